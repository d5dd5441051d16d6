"""Programs of XLA, as text to compare."""

import re


def nameless(program: str) -> str:
    """The instructions of a program, their names replaced by numbers in order of appearance,
    without their origins.
    """
    instructions = program[re.search(r"^(%|ENTRY)", program, re.MULTILINE).start() :]
    instructions = re.sub(r", metadata=\{[^}]*\}", "", instructions)
    numbers = {}
    return re.sub(
        r"%[\w.\-]+", lambda name: f"%{numbers.setdefault(name[0], len(numbers))}", instructions
    )
