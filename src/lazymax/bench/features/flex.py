"""flex_attention on the same cases, its block mask made beforehand or, by compiled code, in every call."""

from collections.abc import Callable
from typing import Any

import torch

from ..peers import LeftOut, Ready
from .calls import Call, maker

FLEX, FLEX_AND_MASK = "flex", "flex+mask"


class Flex:
    """flex_attention for one call. `compiler` compiles it, and `create_block_mask` where it is timed."""

    def __init__(self, call: Call, compiler: Callable[[Any], Any]) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.call = call
        self.attention, self.create = compiler(flex_attention), create_block_mask
        self.create_quickly = compiler(create_block_mask)
        self.score_mod, self.mask_mod = _modifications(call)

    def mask(self, create: Any) -> Any:
        """The block mask by one of the two ways to create it; None if all keys count."""
        if self.mask_mod is None:
            return None
        p, q = self.call.problem, self.call.qkv[0]
        by_batch = p.batch if "bench.prefix_lm" in self.call.feature.flex else None
        return create(self.mask_mod, by_batch, None, p.q_len, p.kv_len, device=str(q.device))

    def before(self) -> Ready:
        """The block mask is made here, outside of what is timed."""
        mask, qkv, options = self.mask(self.create), self.call.qkv, self._options()
        return Ready(lambda: self.attention(*qkv, block_mask=mask, **options))

    def inside(self) -> Ready:
        """The block mask is made in every call."""
        if self.mask_mod is None:
            raise LeftOut("has no block mask here")
        qkv, options = self.call.qkv, self._options()
        return Ready(lambda: self.attention(*qkv, block_mask=self.mask(self.create_quickly), **options))

    def _options(self) -> dict[str, Any]:
        p = self.call.problem
        return dict(score_mod=self.score_mod, scale=p.scale, enable_gqa=p.group > 1)


def _modifications(call: Call) -> tuple[Any, Any]:
    """(score_mod, mask_mod) as flex_attention takes them: the torch forms of ours over their tensors."""
    from . import mods  # imports Triton, which the commands do without

    feature, q = call.feature, call.qkv[0]
    tensors = feature.flex_tensors(maker(feature, q.dtype, q.device))
    score_mod = mask_mod = None
    for name in feature.flex:
        if name in mods.SCORE_MODS:
            score_mod = _score_mod(mods.SCORE_MODS[name][1], *tensors.get("score_mod_args", ()))
        else:
            mask_mod = _mask_mod(mods.MASK_MODS[name][1], *tensors.get("mask_mod_args", ()))
    return score_mod, mask_mod


# Each over one tensor at most, a plain closure: what flex_attention's users write, and what its compiler knows.


def _score_mod(function: Any, t: torch.Tensor | None = None) -> Any:
    def over(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return function(score, b, h, q_idx, k_idx, t)

    return function if t is None else over


def _mask_mod(function: Any, t: torch.Tensor | None = None) -> Any:
    def over(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return function(b, h, q_idx, k_idx, t)

    return function if t is None else over


def peers(call: Call) -> dict[str, Callable[[], Ready]]:
    """What is compared on this case, prepared when called."""
    if not call.feature.flex:
        return {}
    from . import mods

    made: list[Flex] = []

    def prepared() -> Flex:
        if call.qkv[0].device.type == "cpu":
            raise LeftOut("compiled for GPUs only here")
        if not made:
            torch.compiler.reset()  # else earlier cases use up the recompile limit, and it runs eagerly, unfused
            made.append(Flex(call, lambda function: torch.compile(function, dynamic=False)))
        return made[0]

    found: dict[str, Callable[[], Ready]] = {FLEX: lambda: prepared().before()}
    if any(name in mods.MASK_MODS for name in call.feature.flex):
        found[FLEX_AND_MASK] = lambda: prepared().inside()
    return found
