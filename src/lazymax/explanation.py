"""What `lazymax explain` prints: a plan for the forward and one for the backward, with what they were made from."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from .arch import Arch
from .dispatch import Plan
from .dispatch_backward import BackwardPlan, plan_backward
from .problem import Problem


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan with what it was made from; `str()` is the text that `explain` prints."""

    problem: Problem
    arch: Arch
    plan: Plan

    @property
    def backward(self) -> BackwardPlan:
        """What would compute the gradients."""
        return plan_backward(self.problem, self.arch, self.plan)

    def to_json(self) -> str:
        parts: dict[str, Any] = dict(problem=self.problem, arch=self.arch, plan=self.plan, backward=self.backward)
        return json.dumps({name: asdict(part) for name, part in parts.items()}, indent=2)

    def __str__(self) -> str:
        p, plan = self.problem, self.plan
        band = [f"causal {p.align}"] if p.causal else []
        band += [f"window {p.window}"] if p.window != (None, None) else []
        band += [f"packed, {p.packed[0]} and {p.packed[1]} rows"] if p.packed else []
        band += ["seqlens_k"] if p.seqlens_k else []
        band += [f"mask {p.mask}"] if p.mask else []
        band += [f"softcap {p.softcap:g}"] if p.softcap else []
        band += ["ALiBi"] if p.alibi else []
        band += ["sinks"] if p.sinks else []
        band += [f"{kind} {name}" for kind, name in (("score_mod", p.score_mod), ("mask_mod", p.mask_mod)) if name]
        band += [f"dropout {p.dropout_p:g}"] if p.dropout_p else []
        lines = [
            f"problem   {p.dtype} B={p.batch} Hq={p.q_heads} Hkv={p.kv_heads} Sq={p.q_len} Sk={p.kv_len} D={p.head_dim}"
            + (f" Dv={p.v_head_dim}" if p.v_head_dim != p.head_dim else "")
            + (f", {', '.join(band)}" if band else ""),
            f"arch      {self.arch}, Triton {self.arch.triton or 'not installed'}",
            f"route     {plan.describe()}",
            f"because   {plan.reason}",
            f"level     {plan.level}",
        ]
        if plan.tile:
            t = plan.tile
            lines.append(f"tile      {t.describe(plan.rescale)}")
            own = t.describe_for(p, self.arch)
            lines += [f"          {own}"] if own else []
            lines.append(f"          {'tuned' if t.tuned else 'not tuned'}: {t.provenance}")
        lines += [f"note      {note}" for note in plan.notes]
        lines += [f"refused   {r.candidate}: {r.reason}" for r in plan.rejected]
        return "\n".join(lines + self._of_backward())

    def _of_backward(self) -> list[str]:
        plan = self.backward
        lines = [f"backward  {plan.describe()}", f"because   {plan.reason}", f"level     {plan.level}"]
        if plan.tile:
            lines += [f"tile      {plan.tile.describe()}"]
            lines += [f"          {'tuned' if plan.tile.tuned else 'not tuned'}: {plan.tile.provenance}"]
        lines += [f"gradients {plan.determinism}"]
        return lines + [f"refused   {r.candidate}: {r.reason}" for r in plan.rejected]
