"""Checks a repaired wheel: its tag, its contents, and what its native module needs and exports.

python .ci/check_wheel.py dist/coda_jax-...whl
"""

import io
import pathlib
import re
import sys
import zipfile

from elftools.elf.elffile import ELFFile

NEWEST_GLIBC = (2, 28)
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}


def check(path: pathlib.Path) -> None:
    assert path.name.endswith("-manylinux_2_28_x86_64.whl"), path.name
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        modules = [name for name in names if ".so" in name]
        assert len(modules) == 1 and re.fullmatch(r"coda_jax/ffi/_ffi\.cpython-\d+-x86_64-linux-gnu\.so", modules[0])
        wanted = {"coda_jax/cuda/mainloop_sm90.cuh", "coda_jax/py.typed", "flax_layers/py.typed", "coda_jax/doctor.py"}
        assert wanted <= set(names), wanted - set(names)
        strangers = {name for name in names if not name.startswith(("coda_jax/", "flax_layers/", "coda_jax-"))}
        assert not strangers and not any(name.endswith((".cc", ".h")) for name in names), strangers
        elf = ELFFile(io.BytesIO(wheel.read(modules[0])))
    needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert needed <= LIBRARIES, needed - LIBRARIES
    versions = {
        version.name
        for _, of_library in elf.get_section_by_name(".gnu.version_r").iter_versions()
        for version in of_library
    }
    glibc = max(tuple(map(int, re.findall(r"\d+", name))) for name in versions)
    assert all(name.startswith("GLIBC_") for name in versions) and glibc <= NEWEST_GLIBC, versions
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    exported = {x.name for x in symbols if x["st_shndx"] != "SHN_UNDEF" and x["st_info"]["bind"] != "STB_LOCAL"}
    assert exported == {"PyInit__ffi"}, sorted(exported)[:20]
    size, newest = f"{path.stat().st_size / 1024:.0f} KiB", ".".join(map(str, glibc))
    print(f"{path.name}: {size}, {len(names)} files; GLIBC {newest}, needs {', '.join(sorted(needed))}")


for argument in sys.argv[1:]:
    check(pathlib.Path(argument))
