"""The contents of a compiled kernel: registers and spills, its instructions, and their text without the names in it."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import pathlib
import re
import subprocess
import tempfile


@dataclasses.dataclass(frozen=True)
class ResourceUsage:
    """The resources of a thread."""

    registers: int
    spilled_bytes: int


def resource_usage(log: str) -> ResourceUsage:
    """Registers a thread and spilled bytes, from the assembler's report."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise ValueError(f"no resource report in the compiler's log: {log!r}")
    return ResourceUsage(int(registers[1]), int(spills[1]) + int(spills[2]))


def machine_instructions(cubin: bytes) -> int:
    """How many instructions a compiled kernel has, of 16 bytes each."""
    return sum(len(data) for name, data in _sections(cubin).items() if name.startswith(".text")) // 16


def constants(cubin: bytes) -> list[str]:
    """The tables that code reads: constant banks but for that of the parameters and those of addresses."""
    sections = _sections(cubin)
    banks = {name: data for name, data in sections.items() if re.match(r"\.nv\.constant[1-9]", name)}
    return [data.hex() for name, data in sorted(banks.items()) if not {f".rel{name}", f".rela{name}"} & sections.keys()]


def _sections(cubin: bytes) -> dict[str, bytes]:
    """Contents by name."""
    from elftools.elf.elffile import ELFFile  # of the extra test

    file = ELFFile(io.BytesIO(cubin))
    return {one.name: one.data() for one in file.iter_sections() if one["sh_type"] != "SHT_NOBITS"}


def disassembly(cubin: bytes) -> list[str]:
    """The instructions as text, labels and symbols numbered in order of appearance, and the constants they read."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True)
    return without_names(done.stdout) + constants(cubin)


def without_names(text: str) -> list[str]:
    """Lines of a disassembly without comments, blank lines and names."""
    lines = [re.sub(r"/\*.*?\*/|//.*", "", line).strip() for line in text.splitlines()]
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"name{len(numbers)}")

    return [re.sub(r"\.L_x?_?\d+|\$?_Z\w+|\$\w+\$\w+", number, line) for line in lines if line]


def _nvdisasm() -> pathlib.Path:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for found in pathlib.Path(folder).glob("**/bin/nvdisasm"):
            return found
    raise FileNotFoundError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
