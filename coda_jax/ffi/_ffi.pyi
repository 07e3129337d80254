from collections.abc import Sequence
from typing import Any

ABI: int
ATTRIBUTES: dict[str, tuple[str, ...]]  # by target

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
def handlers() -> dict[str, dict[str, Any]]: ...  # by target and stage
