from collections.abc import Sequence
from typing import Any

ABI: int
ATTRIBUTES: tuple[str, ...]

def configure(
    *,
    headers: Sequence[tuple[str, str]],
    headers_hash: str,
    options: Sequence[str],
    libraries: Sequence[tuple[str, str]],
    cache_directory: str,
    cache_limit_bytes: int,
    dump_directory: str,
    quiet: bool,
) -> None: ...
def digest(parts: Sequence[str]) -> str: ...
def kernel_key(source: str, arch: str) -> str: ...
def submit(name: str, source: str, arch: str) -> None: ...
def compile(name: str, source: str, arch: str) -> tuple[bytes, str, float, bool]: ...
def unavailable_reason() -> str: ...
def shutdown() -> None: ...
def handlers() -> dict[str, Any]: ...
def describe_geometry(
    *,
    a: Sequence[int],
    b: Sequence[int],
    result: Sequence[int],
    transpose_a: bool,
    transpose_b: bool,
    tile_m: int,
    tile_n: int,
    ways: int,
    cluster_m: int,
    multiprocessors: int,
    flags: int,
) -> dict[str, int]: ...
