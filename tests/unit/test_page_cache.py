"""The page cache of some files: emptied where the file system can, and told truly."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.engine.experts.file_range import FileRange
from headrace_replicas.engine.experts.page_cache import PageCache

CONTENT = bytes(range(256)) * 4096  # 1 MiB
WHOLE = FileRange(0, 0, len(CONTENT))
IN_MEMORY = {"tmpfs", "ramfs"}
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="how Linux does it")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the file system is what is tested


def kind_of(path: Path) -> str:
    """The type of the file system that a path lies on."""
    mounts = {one.mountpoint: one.fstype for one in psutil.disk_partitions(all=True)}
    return next(mounts[str(p)] for p in (path, *path.parents) if str(p) in mounts)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that was just written, so that its pages have not reached the disk."""
    path = tmp_path / "experts.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def pages(file: Path) -> Iterator[PageCache]:
    if kind_of(file) in IN_MEMORY:
        pytest.skip("this folder lies in memory")
    with PageCache([file]) as found:
        yield found


def test_a_file_that_was_just_written_can_be_dropped(pages: PageCache) -> None:
    """Its pages are synced first: what has not reached the disk cannot be forgotten."""
    assert pages.resident_ratio([WHOLE]) == 1.0
    pages.drop()
    assert pages.resident_ratio([WHOLE]) == 0.0


@on_linux
def test_what_is_read_is_there_again(pages: PageCache, file: Path) -> None:
    """Ranges need not begin at pages; the pages that they touch count."""
    pages.drop()
    with file.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(opened.fileno(), 100, 500_000)
    assert pages.resident_ratio([FileRange(0, 500_010, 20)]) == 1.0
    assert pages.resident_ratio([FileRange(0, 0, 100)]) == 0.0
    ratio = pages.resident_ratio([FileRange(0, 500_010, 20), FileRange(0, 0, 100)])
    assert ratio == 0.5


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="needs a file system in memory")
def test_a_file_system_that_cannot_evict_is_found_out() -> None:
    """Files in memory stay there, whatever they are asked."""
    path = SHARED_MEMORY / f"headrace-{os.getpid()}.bin"
    try:
        path.write_bytes(CONTENT)
        with PageCache([path]) as pages:
            pages.drop()
            assert pages.resident_ratio([WHOLE]) == 1.0
    finally:
        path.unlink(missing_ok=True)


@on_linux
def test_of_another_users_file_nothing_is_claimed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux would say of all its pages that they are there."""
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with PageCache([file]) as pages:
        assert pages.resident_ratio([WHOLE]) is None


def test_nothing_to_look_at_is_no_ratio(pages: PageCache) -> None:
    assert pages.resident_ratio([]) is None


def test_a_missing_file_is_named_and_the_others_are_closed(file: Path, tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(ExpertReadError, match=r"gone\.bin cannot be opened: No such file"):
        PageCache([file, tmp_path / "gone.bin"])
    assert psutil.Process().num_fds() == before


@on_linux
def test_the_calls_for_macos_do_no_harm(
    pages: PageCache, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux takes the same call and drops nothing by it; what macOS does has not been seen."""
    monkeypatch.setattr(sys, "platform", "darwin")
    pages.drop()
    assert "MS_INVALIDATE" in pages.how
    assert pages.resident_ratio([WHOLE]) == 1.0
    assert file.read_bytes() == CONTENT
