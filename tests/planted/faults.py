"""Faults: chosen by a seed over the code that is there, or found again in another commit's."""

from __future__ import annotations

import difflib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tests.planted import python, sql

SEED = 1
PACKAGE = Path("src", "holdfast")
LANGUAGES = {".py": python, ".sql": sql}
FUNCTIONS = "functions"  # the folder of SQL whose files are functions
FOLDERS = ("worker", "operator", "idempotency", "postgres/sql/functions")


class BadInput(Exception):
    """An argument that names nothing: the text names the field, the problem and the remedy."""


@dataclass(frozen=True)
class Fault:
    """Lines of a function, and the lines that stand there while the fault is planted."""

    number: int
    kind: str
    path: str  # from the root of the tree
    function: str
    line: int
    before: list[str]
    after: list[str]

    @cached_property
    def language(self) -> str:
        return Path(self.path).suffix

    @property
    def place(self) -> str:
        return f"{Path(self.path).relative_to(PACKAGE)}:{self.line} {self.function}"

    def planted(self, source: str) -> str:
        """Return the source of the file with the fault."""
        lines = source.split("\n")
        here = slice(self.line - 1, self.line - 1 + len(self.before))
        if lines[here] != self.before:
            raise ValueError(f"{self.path}:{self.line} has other lines than fault {self.number}")
        lines[here] = self.after
        return "\n".join(lines)

    def difference(self) -> str:
        lines = difflib.unified_diff(self.before, self.after, n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def choose(root: Path, folders: Sequence[str], count: int) -> list[Fault]:
    """Choose faults, half of them in SQL where there is any: by the seed, the same ones on the same tree.

    Folders and kinds take turns, and no function has two.
    """
    pools: dict[str, dict[str, list[Fault]]] = {}
    for folder in folders:
        for language in LANGUAGES:
            if found := list(_offered(root, folder, language)):
                pools.setdefault(language, {})[folder] = found
    chosen: list[Fault] = []
    for left, (language, pool) in zip(range(len(pools), 0, -1), sorted(pools.items()), strict=True):
        chosen += _chosen(random.Random(f"{SEED} {language}"), pool, (count - len(chosen) + left - 1) // left)
    if len(chosen) < count:
        raise BadInput(f"--faults {count}: {', '.join(folders)} offer only {len(chosen)}. Ask for fewer.")
    return [replace(fault, number=number) for number, fault in enumerate(chosen, 1)]


def _chosen(dice: random.Random, pool: dict[str, list[Fault]], count: int) -> list[Fault]:
    chosen: list[Fault] = []
    kinds: Counter[str] = Counter()
    while len(chosen) < count and pool:
        for folder in list(pool)[: count - len(chosen)]:
            fewest = min(kinds[each.kind] for each in pool[folder])
            kind = dice.choice(sorted({each.kind for each in pool[folder] if kinds[each.kind] == fewest}))
            of_kind = [each for each in pool[folder] if each.kind == kind]
            function = dice.choice(sorted({(each.path, each.function) for each in of_kind}))
            fault = dice.choice([each for each in of_kind if (each.path, each.function) == function])
            kinds[kind] += 1
            chosen.append(fault)
            pool[folder] = [each for each in pool[folder] if (each.path, each.function) != function]
            if not pool[folder]:
                del pool[folder]
    return chosen


def _offered(root: Path, folder: str, language: str) -> Iterator[Fault]:
    if not (root / PACKAGE / folder).is_dir():
        raise BadInput(
            f"--in {folder}: src/holdfast has no such folder. Name one, such as worker or operator/catalogue."
        )
    for path, source in _sources(root, folder):
        if path.suffix == language:
            for change in LANGUAGES[language].changes(source):
                line, before, after = change.lines(source)
                name = path.relative_to(root).as_posix()
                yield Fault(0, change.kind, name, change.function, line, before, after)


def _sources(root: Path, folder: str = "") -> Iterator[tuple[Path, str]]:
    for path in sorted((root / PACKAGE / folder).rglob("*")):
        if path.suffix == ".py" or (path.suffix == ".sql" and path.parent.name == FUNCTIONS):
            yield path, path.read_text(encoding="utf-8")


# --- faults of another commit -------------------------------------------------------------------------


def read(file: Path) -> tuple[list[Fault], set[int]]:
    """Return the faults that a run has written with --json, and the numbers of those that it found."""
    try:
        faults = json.loads(file.read_text(encoding="utf-8"))["faults"]
        found = {each["number"] for each in faults if each["result"] == "found"}
        return [Fault(**{name: each[name] for name in Fault.__dataclass_fields__}) for each in faults], found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--from {file}: holds no faults ({error!r}). Name a file written with --json.") from error


def found_again(root: Path, faults: Iterable[Fault]) -> tuple[list[Fault], list[Fault]]:
    """Return these faults where they are in this tree, and those that no longer exist.

    A fault is found by the name of its function and the lines it changes, in whatever file and depth.
    """
    places: dict[tuple[str, str], list[tuple[Path, list[str], int, int]]] = {}
    for path, source in _sources(root):
        lines = source.split("\n")
        for name, first, last in LANGUAGES[path.suffix].functions(source):
            places.setdefault((path.suffix, name), []).append((path, lines, first, last))
    here, gone = [], []
    for fault in faults:
        # The same name may stand in several files: the file of that commit comes first.
        found = sorted(places.get((fault.language, fault.function), []), key=lambda place: str(place[0]) != fault.path)
        moved = [moved for place in found for moved in _in_function(root, fault, *place)]
        here += moved[:1]
        gone += [] if moved else [fault]
    return here, gone


def _in_function(root: Path, fault: Fault, path: Path, lines: list[str], first: int, last: int) -> Iterator[Fault]:
    wanted = [line.strip() for line in fault.before]
    # Where the lines stand more than once in a function, those nearest to their old place in the file are meant.
    for line in sorted(range(first, last + 2 - len(wanted)), key=lambda line: abs(line - fault.line)):
        before = lines[line - 1 : line - 1 + len(wanted)]
        if [each.strip() for each in before] == wanted:
            deeper = _indent(before[0]) - _indent(fault.before[0])
            after = [" " * max(0, _indent(each) + deeper) + each.lstrip(" ") for each in fault.after]
            name = path.relative_to(root).as_posix()
            yield replace(fault, path=name, line=line, before=before, after=after)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
