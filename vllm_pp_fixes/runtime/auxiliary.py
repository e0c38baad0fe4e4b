"""Auxiliary hidden states over pipeline stages: what EAGLE-3 and its kin read of the target's inner layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group
from vllm.sequence import IntermediateTensors

from .compose import DropIn, subclass
from .stages import States

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Capturing:
    """Mixin over an upstream inner model with a hook for auxiliary states: each state is captured on one stage.

    Upstream's loop gives what it captures on the last stage only, and counts a state between two stages on both or
    on neither. A stage that is not the last writes its states into buffers, `(max_num_batched_tokens, hidden_size)`
    each, that the outer model sends: upstream's `forward` stays as it is, and a CUDA graph writes to a fixed address.
    """

    supports_aux_hidden_states_over_pp = True
    aux_states = States()
    is_last_stage = True

    def _maybe_add_hidden_state(
        self,
        aux_hidden_states: list[torch.Tensor],
        layer_idx: int,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        if layer_idx in self.aux_states.layers:
            state = hidden_states if residual is None else hidden_states + residual
            if self.is_last_stage:
                aux_hidden_states.append(state)
            else:
                getattr(self, f"state_buffer_{layer_idx}")[: state.size(0)].copy_(state)
        return aux_hidden_states


class AuxiliaryStatesOverStages(DropIn):
    """Mixin over an upstream model with EAGLE-3: the draft reads the states that one stage would give it (#50514).

    Runner V2 has each stage receive the states of those before, relays them, and hands the last stage's to the draft.
    """

    outermost = True
    aux_states = States()
    sent_by_runner = True

    def built(self, vllm_config: VllmConfig) -> None:
        """Take down what is asked for when the draft is known."""
        super().built(vllm_config)
        hidden_size = self.language_model.model.config.hidden_size
        self.shape_of_states = vllm_config.scheduler_config.max_num_batched_tokens, hidden_size
        self.dtype_of_states = vllm_config.model_config.dtype
        self.sent_by_runner = vllm_config.use_v2_model_runner

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Have the states of these layers captured, each on its own stage.

        Raises `ValueError` where a state of an earlier stage is wanted under runner V1, which sends none.
        """
        group, inner = get_pp_group(), self.language_model.model
        if group.world_size > 1:
            wanted = tuple(sorted(set(layers)))
            states = States.of(wanted, inner.start_layer, inner.end_layer, group.is_first_rank, group.is_last_rank)
            if states.received and not self.sent_by_runner:
                raise ValueError(
                    f"vllm_pp_fixes: the draft reads states of the layers {[*wanted]}, the last stage has those after "
                    f"{inner.start_layer}, and runner V1 sends none over stages: set VLLM_USE_V2_MODEL_RUNNER=1"
                )
            if not isinstance(inner, Capturing):
                inner.__class__ = subclass(type(inner).__name__, __name__, (Capturing, type(inner)))
            inner.aux_states, inner.is_last_stage = states, group.is_last_rank
            weight = next(inner.layers[inner.start_layer].parameters())
            for layer in () if group.is_last_rank else states.layers:
                buffer = torch.zeros(self.shape_of_states, dtype=self.dtype_of_states, device=weight.device)
                inner.register_buffer(f"state_buffer_{layer}", buffer, persistent=False)
            self.aux_states = states
            self.say(states, "auxiliary states")
        super().set_aux_hidden_state_layers(layers)  # type: ignore[misc]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        """Run this stage's layers; send the states that it captured, or, on the last stage, give all of them.

        The last stage returns `(hidden states, [state, ...])`, each `(num_tokens, hidden_size)`, where states are
        asked for.
        """
        self.hear()
        states, remote = self.aux_states, []
        if states.received:
            assert intermediate_tensors is not None
            tensors = dict(intermediate_tensors.items())
            remote = [tensors.pop(self._key(number)) for number in states.received]
            intermediate_tensors = IntermediateTensors(tensors)
        output: Any = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)  # type: ignore[misc]
        if isinstance(output, IntermediateTensors):
            tokens, inner = output["hidden_states"].size(0), self.language_model.model
            for number, layer in zip(states.captured, states.layers, strict=True):
                # A copy: the send may still be under way when the next batch is captured.
                output.tensors[self._key(number)] = getattr(inner, f"state_buffer_{layer}")[:tokens].clone()
        elif remote:
            hidden_states, own = output if isinstance(output, tuple) else (output, [])
            output = hidden_states, remote + own
        return output

    def _key(self, number: int) -> str:
        return f"{self.language_model.model.AUX_HIDDEN_STATE_KEY}{number}"
