"""What several faults look for in the source of a model with DeepStack levels."""

from __future__ import annotations

import ast

from .source import CannotTell, Tree, assigns, dotted, enclosed, mentions

FACTORY = "make_empty_intermediate_tensors"
LEVELS = "deepstack_input_embeds"
"""Attribute that holds the levels of a batch."""

OWN_GRAPHS_REST_ON = {"vllm_config.compute_hash:additional_config": "takes `additional_config` into the cache's key"}
"""What keeps a drop-in's compiled graphs apart from upstream's; see `Fault.rests_on`."""

POSITIONS_REST_ON = {
    "__init__": "sets the factory",
    "forward": "hands positions to the inner model as they are; returns a dictionary on every stage but the last",
    "language_model.model.forward": "rotates by the positions that it is given, and by nothing else",
    **OWN_GRAPHS_REST_ON,
}
"""What sending positions over stages takes for granted; see `Fault.rests_on`."""

CARRIED_RESTS_ON = {
    "__init__": "builds the buffers of the levels, the text model, and takes the text model's factory for its own",
    "language_model.__init__": "takes the factory of the model inside for its own",
    "language_model.model.__init__": "gives the stage's layers, and a factory that declares hidden states and residual",
    **OWN_GRAPHS_REST_ON,
    "forward": "hands the levels of its buffers to the inner model on the first stage only, and then clears them",
    "language_model.model.forward": "adds level k after layer k, from the key `deepstack_input_embeds_<k>`, for each k "
    "below the number of levels that it is given; takes the five arguments that are passed here; returns hidden states "
    "and residual, or the last stage's hidden states",
    "embed_input_ids": "runs on the first stage in each step, and sets the levels of the batch",
    f"_get_{LEVELS}": "gives views of the buffers, zero where the batch has no level",
    f"_set_{LEVELS}": "writes the levels of a batch into the buffers",
    f"_clear_{LEVELS}": "zeroes that many rows of the buffers",
    FACTORY: "is an attribute that the constructor sets, and declares hidden states and residual, no level",
}
"""What carrying levels over stages takes for granted; see `Fault.rests_on`."""


def takes_over_factory(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the constructor takes the factory of its text model, which declares no levels, for its own."""
    init, own = tree.builder(model, cls)[2], f"self.{FACTORY}"
    taken = [dotted(assigns(found[-1], own)) for found in enclosed(init, lambda s: assigns(s, own) is not None)]
    if f"self.language_model.{FACTORY}" in taken:
        return True
    if taken or tree.method(model, cls, FACTORY):
        return False
    raise CannotTell(f"{cls} in {model}.py has no {FACTORY}")


def refusals(tree: Tree, model: str, cls: str) -> list[list[ast.stmt]]:
    """Return the assertions of the constructor that ask where a stage's layers start, with what encloses each."""
    init = tree.builder(model, cls)[2]
    return [*enclosed(init, lambda s: isinstance(s, ast.Assert) and mentions(s.test, "start_layer"))]


def buffer_assignments(tree: Tree, model: str, cls: str) -> list[list[ast.stmt]]:
    """Return the assignments of the constructor that make a list of buffers for the levels, with what encloses each."""
    init = tree.builder(model, cls)[2]
    return [*enclosed(init, lambda s: isinstance(assigns(s, f"self.{LEVELS}"), ast.List | ast.ListComp))]


def hides_empty_buffers(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the getter of the levels answers None as long as no batch had any."""
    getter = tree.method(model, cls, f"_get_{LEVELS}")
    return getter is not None and mentions(getter, f"{LEVELS}_num_tokens")


def asks_for_tower(node: ast.AST) -> bool:
    """Tell whether a node asks if the tower is left out."""
    return mentions(node, "StageMissingLayer") or mentions(node, "get_limit_per_prompt")


def asked_around(found: list[ast.stmt]) -> list[ast.expr]:
    """Return the conditions of the `if` statements that a statement stands in."""
    return [statement.test for statement in found if isinstance(statement, ast.If)]


PACK = "pack_local_aux_hidden_states"
"""How upstream names what puts a stage's auxiliary states among those that it sends."""


def sends_states(tree: Tree) -> bool:
    """Tell whether this vLLM sends auxiliary states over stages, for some model. Raises `CannotTell`."""

    def packs(node: ast.AST) -> bool:
        return isinstance(node, ast.FunctionDef) and node.name == PACK

    return tree.mentions("model_executor/models/interfaces.py", packs)
