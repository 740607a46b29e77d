"""Loops of a program, and what every iteration of one passes through."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .sass import Instruction, Program

ENDS = {"BRA", "BRX", "BRXU", "EXIT", "RET", "CALL", "BSYNC", "BREAK", "JMP"}
LEAVES = {"EXIT", "RET", "BRX", "BRXU"}  # a branch through a table: its targets have no predecessor then


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop: all blocks from which its head is reached again without leaving."""

    address: int  # of the head
    blocks: frozenset[int]
    instructions: list[Instruction]  # in the order of addresses
    always: list[Instruction]  # of the blocks without which there is no next iteration
    once: list[Instruction]  # of no loop inside it, such as the retries of a wait

    def count(self, *mnemonics: str) -> int:
        """Of all its instructions, those that begin so."""
        return sum(instruction.name.startswith(mnemonics) for instruction in self.instructions)


def _target(instruction: Instruction, labels: dict[str, int]) -> int | None:
    found = re.search(r"`\(([^)]+)\)", instruction.operands)
    return labels.get(found[1]) if found and instruction.mnemonic == "BRA" else None


def _graph(program: Program) -> tuple[dict[int, int], dict[int, list[int]]]:
    """(end of each basic block by its start, blocks that may follow)."""
    code, starts = program.instructions, {0, *program.labels.values()}
    for index, instruction in enumerate(code):
        if instruction.mnemonic in ENDS:
            starts.add(index + 1)
    ordered = sorted(start for start in starts if start < len(code))
    ends = dict(zip(ordered, [*ordered[1:], len(code)], strict=True))
    follow: dict[int, list[int]] = {}
    for start, end in ends.items():
        last, follow[start] = code[end - 1], []
        conditional = last.predicate is not None or last.operands.startswith(("UP", "!UP", "P", "!P"))
        if last.mnemonic == "BRA":
            target = _target(last, program.labels)
            follow[start] += [target] if target is not None else []
            falls_through = conditional
        else:
            falls_through = last.predicate is not None or last.mnemonic not in LEAVES
        if falls_through and end in ends:
            follow[start].append(end)
    return ends, follow


def _reached(root: int, follow: dict[int, list[int]], seen: set[int]) -> list[int]:
    """Blocks that are reached from the root for the first time, each after those behind it."""
    order, stack = [], [(root, iter(follow[root]))]
    seen.add(root)
    while stack:
        block, others = stack[-1]
        for other in others:
            if other not in seen:
                seen.add(other)
                stack.append((other, iter(follow[other])))
                break
        else:
            order.append(block)
            stack.pop()
    return order


def _dominators(follow: dict[int, list[int]], before: dict[int, set[int]]) -> dict[int, int]:
    """For each block a bit set, by position among the sorted starts, of the blocks that every way to it passes."""
    blocks, seen, order = sorted(follow), set[int](), list[int]()
    bit = {block: 1 << at for at, block in enumerate(blocks)}
    roots = {block for block in blocks if not before[block] or block == blocks[0]}
    for block in [*sorted(roots), *blocks]:  # then those that are reached from no root
        if block not in seen:
            roots.add(block)
            order += _reached(block, follow, seen)
    everything = (1 << len(blocks)) - 1
    found = {block: bit[block] if block in roots else everything for block in blocks}
    changed = True
    while changed:
        changed = False
        for block in reversed(order):
            if block in roots:
                continue
            common = everything
            for other in before[block]:
                common &= found[other]
            if found[block] != common | bit[block]:
                found[block], changed = common | bit[block], True
    return found


def loops(program: Program) -> list[Loop]:
    """In the order of their heads."""
    ends, follow = _graph(program)
    before: dict[int, set[int]] = defaultdict(set)
    for block, others in follow.items():
        for other in others:
            before[other].add(block)
    dominators = _dominators(follow, before)
    bit = {block: 1 << at for at, block in enumerate(sorted(ends))}
    bodies: dict[int, set[int]] = {}
    latches: dict[int, list[int]] = defaultdict(list)
    for block in sorted(ends):
        for head in follow[block]:
            if not dominators[block] & bit[head]:
                continue
            body, stack = bodies.setdefault(head, {head}), [block]
            latches[head].append(block)
            while stack:
                other = stack.pop()
                if other not in body:
                    body.add(other)
                    stack += before[other]
    code = program.instructions

    def of(some: Iterable[int]) -> list[Instruction]:
        return [instruction for block in sorted(some) for instruction in code[block : ends[block]]]

    found = []
    for head, body in sorted(bodies.items()):
        always = (block for block in body if all(dominators[latch] & bit[block] for latch in latches[head]))
        inside = {block for other in bodies.values() if other < body for block in other}
        found.append(Loop(code[head].address, frozenset(body), of(body), of(always), of(body - inside)))
    return found
