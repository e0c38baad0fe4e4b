"""EAGLE-3's auxiliary states over stages: bit for bit those that one stage of upstream's gives its draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import Checkpoint, edited
from tests.installed import FAULTS, TREE, right
from tests.stages.conftest import LAYERS, OURS, UPSTREAM, batches, equal, model_class
from tests.stages.pipeline import Batch, Model, engine_config, receive_v2, start_distributed
from vllm_pp_fixes.source import mentions

SENT = TREE.mentions(
    "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py", lambda node: mentions(node, "_aux_slot_base_cached")
)
"""Whether runner V2 sends auxiliary states over stages."""
MODELS = [model_type for model_type in ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker") if SENT]
EVERY = tuple(range(LAYERS + 1))
CASES = [(model_type, EVERY) for model_type in MODELS] + [("qwen3_vl", asked) for asked in ((1, 3, 5), (2, 1), (4,))]
SPLITS = (3, 3), (1, 5), (1, 1, 4), (1,) * 6
pytestmark = pytest.mark.skipif(not MODELS, reason="this release sends no auxiliary states over stages")


class Drafted:
    """A pipeline whose last stage gives auxiliary states, with what runner V2 does about them."""

    def __init__(
        self, checkpoint: Checkpoint, model_type: str, package: str, split: tuple[int, ...], asked: Any
    ) -> None:
        start_distributed()
        folder = checkpoint(model_type)
        config = [engine_config(str(edited(folder) if package == UPSTREAM else folder)) for _ in split]
        self.stages = [Model(model_class(model_type, package), each, split, rank) for rank, each in enumerate(config)]
        from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils as upstream

        self.relayed = []
        for stage, each in zip(self.stages, config, strict=True):
            stage.model.sent_by_runner = True
            with stage.on_stage():
                stage.model.set_aux_hidden_state_layers(asked)
                upstream.reserve_aux_intermediate_tensor_slots(stage.model)
                if len(split) > 1:
                    upstream.verify_supports_aux_hidden_states_over_pp(stage.model, "eagle3")
                self.relayed.append(upstream.aux_hidden_state_relay_keys(stage.model))
                if not stage.group.is_first_rank:
                    stage.buffers = stage.model.make_empty_intermediate_tensors(256, each.model_config.dtype, "cpu")

    def run(self, batch: Batch) -> list[torch.Tensor]:
        """Hidden states of the last stage, and the auxiliary ones."""
        first, *later = self.stages
        embeds, tokens = first.embed(batch), batch.input_ids.numel()
        positions = first.positions(tokens)
        output = first.step(batch.input_ids if embeds is None else None, positions, None, embeds)
        received = None
        for relayed, stage in zip(self.relayed, [*later, None], strict=True):
            if stage is None:
                break
            sent = {name: tensor.clone() for name, tensor in output.items()}
            sent |= {name: received[name].clone() for name in relayed} if received else {}
            assert set(sent) == set(stage.buffers.tensors)
            received = receive_v2(stage.buffers, sent, tokens)
            output = stage.step(None, positions.clone(), received, None)
        hidden_states, states = output
        return [hidden_states.clone(), *(state.clone() for state in states)]


@pytest.mark.parametrize(("model_type", "asked"), CASES, ids=str)
def test_the_draft_is_given_what_one_stage_gives(
    model_type: str, asked: tuple[int, ...], checkpoint: Checkpoint
) -> None:
    one = Drafted(checkpoint, model_type, UPSTREAM, (LAYERS,), asked)
    wanted = [one.run(batch) for batch in batches(model_type)]
    assert all(len(each) == 1 + len(asked) for each in wanted)
    for split in SPLITS:
        for package in (OURS, UPSTREAM) if right(model_type) else (OURS,):
            made = Drafted(checkpoint, model_type, package, split, asked)
            for batch, each in zip(batches(model_type), wanted, strict=True):
                assert equal(made.run(batch), each), (package, split)


@pytest.mark.parametrize("model_type", [each for each in MODELS if "aux-states-lost" not in FAULTS[each]])
def test_an_inner_model_that_sends_is_left_alone(model_type: str, checkpoint: Checkpoint) -> None:
    (stage, _) = Drafted(checkpoint, model_type, OURS, (1, 5), (1, 3, 5)).stages
    inner = stage.model.language_model.model
    assert type(inner).__module__ == f"{UPSTREAM}.{model_type}"
    assert not hasattr(inner, "aux_states")


@pytest.mark.skipif("aux-states-lost" not in FAULTS["qwen3_vl"], reason="cured in this tree")
def test_runner_v1_which_sends_none_is_refused(checkpoint: Checkpoint) -> None:
    """The layers of the last stage alone are right there, as upstream's are."""
    start_distributed()
    config = engine_config(str(checkpoint("qwen3_vl")))
    stage = Model(model_class("qwen3_vl", OURS), config, (1, 5), 1)
    assert not stage.model.sent_by_runner
    with stage.on_stage():
        stage.model.set_aux_hidden_state_layers((2, 4))
        with pytest.raises(ValueError, match=r"states of the layers \[1, 4\].* runner V1 sends none over stages"):
            stage.model.set_aux_hidden_state_layers((1, 4))
