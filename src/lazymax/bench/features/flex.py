"""flex_attention on the same cases, its block mask made beforehand or in every call."""

from collections.abc import Callable
from typing import Any

import torch

from ..peers import LeftOut, Ready
from .calls import Call, maker

FLEX, FLEX_AND_MASK = "flex", "flex+mask"


class Flex:
    """flex_attention for one call. `compiler` compiles it and its `create_block_mask`."""

    def __init__(self, call: Call, compiler: Callable[[Any], Any]) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.call = call
        self.attention, self.create = compiler(flex_attention), compiler(create_block_mask)
        self.score_mod, self.mask_mod = _modifications(call)

    def mask(self) -> Any:
        """The block mask; None if all keys count."""
        if self.mask_mod is None:
            return None
        p, q = self.call.problem, self.call.qkv[0]
        by_batch = p.batch if "bench.prefix_lm" in self.call.feature.flex else None
        return self.create(self.mask_mod, by_batch, None, p.q_len, p.kv_len, device=str(q.device))

    def before(self) -> Ready:
        """The block mask is made here, outside of what is timed."""
        mask, qkv, options = self.mask(), self.call.qkv, self._options()
        return Ready(lambda: self.attention(*qkv, block_mask=mask, **options))

    def inside(self) -> Ready:
        """The block mask is made in every call."""
        if self.mask_mod is None:
            raise LeftOut("has no block mask here")
        qkv, options = self.call.qkv, self._options()
        return Ready(lambda: self.attention(*qkv, block_mask=self.mask(), **options))

    def _options(self) -> dict[str, Any]:
        p = self.call.problem
        return dict(score_mod=self.score_mod, scale=p.scale, enable_gqa=p.group > 1)


def _modifications(call: Call) -> tuple[Any, Any]:
    """(score_mod, mask_mod) as flex_attention takes them: the torch forms of ours over their tensors."""
    from . import mods

    feature, q = call.feature, call.qkv[0]
    tensors = feature.flex_tensors(maker(feature, q.dtype, q.device))
    score_mod = mask_mod = None
    for name in feature.flex:
        if name in mods.SCORE_MODS:
            score_mod = _over(mods.SCORE_MODS[name][1], tensors.get("score_mod_args", ()))
        else:
            mask_mod = _over(mods.MASK_MODS[name][1], tensors.get("mask_mod_args", ()))
    return score_mod, mask_mod


def _over(function: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """The function over its tensor, if it takes one; how many leading arguments it has is what tells the two kinds of
    modification apart."""
    if not tensors:
        return function
    (t,) = tensors
    if next(iter(function.__code__.co_varnames)) == "score":

        def of_score(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
            return function(score, b, h, q_idx, k_idx, t)

        return of_score

    def of_mask(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return function(b, h, q_idx, k_idx, t)

    return of_mask


def peers(call: Call) -> dict[str, Callable[[], Ready]]:
    """What is compared on this case, prepared when called."""
    if not call.feature.flex:
        return {}
    made: list[Flex] = []

    def prepared() -> Flex:
        if call.qkv[0].device.type == "cpu":
            raise LeftOut("compiled for GPUs only here")
        if not made:
            torch.compiler.reset()  # else earlier cases use up the recompile limit, and it runs eagerly, unfused
            made.append(Flex(call, lambda function: torch.compile(function, dynamic=False)))
        return made[0]

    found: dict[str, Callable[[], Ready]] = {FLEX: lambda: prepared().before()}
    if any(name != "bench.softcap_50" and name != "bench.alibi" for name in call.feature.flex):
        found[FLEX_AND_MASK] = lambda: prepared().inside()
    return found
