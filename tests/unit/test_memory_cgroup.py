"""Where a memory cgroup can be made: told from folders like the kernel's, then tried for real."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.memory_cgroup import (
    V1,
    V2,
    NoMemoryCgroupError,
    memory_cgroup,
    parent_for_limits,
)

MIB = 2**20
V1_LISTING = "9:name=systemd:/\n4:cpuset,memory:/jobs/7\n0::/\n"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_version_1_limits_below_this_processs_own_group(tmp_path: Path) -> None:
    """So that every limit above it holds too."""
    own = "sys/fs/cgroup/memory/jobs/7"
    tree(tmp_path, {"proc/self/cgroup": V1_LISTING, f"{own}/memory.limit_in_bytes": "1"})
    assert parent_for_limits(tmp_path) == (tmp_path / own, V1)


def test_a_container_that_sees_its_own_group_as_the_mount_limits_below_that(tmp_path: Path) -> None:
    """The listing names the host's path, which is not there."""
    mount = "sys/fs/cgroup/memory"
    tree(tmp_path, {"proc/self/cgroup": V1_LISTING, f"{mount}/memory.limit_in_bytes": "1"})
    assert parent_for_limits(tmp_path) == (tmp_path / mount, V1)


def test_version_2_limits_beside_this_process(tmp_path: Path) -> None:
    """A group with processes cannot give its children controllers; the slice above it does."""
    mount = "sys/fs/cgroup"
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/app.slice/run-1.scope\n",
            f"{mount}/cgroup.controllers": "cpu memory pids\n",
            f"{mount}/cgroup.subtree_control": "cpu memory pids\n",
            f"{mount}/user.slice/app.slice/cgroup.subtree_control": "memory pids\n",
            f"{mount}/user.slice/app.slice/run-1.scope/cgroup.subtree_control": "\n",
        },
    )
    assert parent_for_limits(tmp_path) == (tmp_path / mount / "user.slice/app.slice", V2)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "has no memory cgroups"),
        ({"proc/self/cgroup": "1:cpu:/\n"}, "no cgroup here limits memory"),
        ({"proc/self/cgroup": V1_LISTING}, "is not mounted here"),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cgroup.controllers": "memory\n",
                "sys/fs/cgroup/cgroup.subtree_control": "\n",
            },
            "gives its children the memory controller",
        ),
    ],
)
def test_where_none_can_be_made_the_reason_says_what_to_run(
    tmp_path: Path, files: Mapping[str, str], why: str
) -> None:
    """And where."""
    with pytest.raises(NoMemoryCgroupError, match=why) as caught:
        parent_for_limits(tree(tmp_path, files))
    assert "sudo make memory-limit" in str(caught.value)


def test_a_group_gets_its_limit_and_no_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swap has a limit of its own in version 2."""
    make_folder = Path.mkdir

    def made_by_the_kernel(folder: Path) -> None:
        make_folder(folder)
        (folder / "memory.swap.max").write_text("max")

    mount = "sys/fs/cgroup"
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            f"{mount}/cgroup.controllers": "memory\n",
            f"{mount}/cgroup.subtree_control": "memory\n",
        },
    )
    monkeypatch.setattr(Path, "mkdir", made_by_the_kernel)
    with memory_cgroup(3 * MIB, root=tmp_path) as group:
        assert group.folder.parent == tmp_path / mount
        assert (group.folder / "memory.max").read_text() == str(3 * MIB)
        assert (group.folder / "memory.swap.max").read_text() == "0"
        assert group.command(["true"])[-2:] == [str(group.folder / "cgroup.procs"), "true"]
        for file in group.folder.iterdir():  # the kernel's own files would not be in the way
            file.unlink()
    assert not group.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
def test_the_kernel_ends_what_takes_more_than_its_group_may() -> None:
    """Or no run inside a group would prove anything."""
    takes = "block = bytearray({} * 2**20); print(len(block))"
    try:
        with memory_cgroup(64 * MIB) as group:
            within = group.command([sys.executable, "-c", takes.format(16)])
            subprocess.run(within, check=True, stdout=subprocess.DEVNULL)
            assert group.killed() == 0
            assert 16 * MIB < group.peak_bytes() <= 64 * MIB
            beyond = group.command([sys.executable, "-c", takes.format(128)])
            ended = subprocess.run(beyond, check=False, stdout=subprocess.DEVNULL)
            assert ended.returncode == -9
            assert group.killed() == 1
    except NoMemoryCgroupError as error:
        pytest.skip(str(error))
