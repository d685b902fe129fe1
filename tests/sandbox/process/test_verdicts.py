from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ringfence.sandbox.process.seccomp import verdicts
from ringfence.sandbox.process.seccomp.syscalls import NUMBERS
from ringfence.sandbox.process.seccomp.verdicts import ALLOW, ENOSYS, NOTIFY, POLICY, ArgRule

GROUPS = (verdicts._ALLOWED, verdicts._NOTABLE, verdicts._ABSENT)


def test_every_known_call_has_exactly_one_verdict() -> None:
    named = [name for groups in GROUPS for names in groups.values() for name in names.split()]
    named += [name for _, names in verdicts._PLAIN.values() for name in names.split()]
    named += verdicts._CHECKED
    assert [name for name, times in Counter(named).items() if times > 1] == []
    assert set(named) == set(POLICY) == set(NUMBERS["x86_64"]) | set(NUMBERS["aarch64"])


def outline(machine: str) -> list[str]:
    """What may run, in the order of names; a star where the arguments decide."""
    names = (name for name in sorted(NUMBERS[machine]) if POLICY[name] == ALLOW or isinstance(POLICY[name], ArgRule))
    return [f"{name} *" if isinstance(POLICY[name], ArgRule) else name for name in names]


@pytest.mark.parametrize("machine", NUMBERS)
def test_what_is_allowed_changes_only_on_purpose(machine: str) -> None:
    golden = Path(__file__).with_name(f"allowed.{machine}.txt")
    assert outline(machine) == golden.read_text().splitlines()


HOSTILE = """
    unshare setns mount umount2 pivot_root move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick
    mount_setattr chroot io_uring_setup io_uring_enter io_uring_register bpf perf_event_open userfaultfd keyctl add_key
    request_key kexec_load kexec_file_load init_module finit_module delete_module reboot swapon swapoff acct
    settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname quotactl syslog name_to_handle_at
    open_by_handle_at ptrace process_vm_readv process_vm_writev pidfd_getfd process_madvise kcmp fanotify_init
    modify_ldt iopl ioperm vhangup"""


@pytest.mark.parametrize("name", HOSTILE.split())
def test_an_attempt_on_the_kernel_is_refused_whatever_its_arguments_and_told(name: str) -> None:
    assert POLICY[name] == NOTIFY


@pytest.mark.parametrize(
    "name", ["clone3", "io_setup", "memfd_secret", "cachestat", "statmount", "listmount", "uselib"]
)
def test_what_programs_only_try_is_absent(name: str) -> None:
    assert POLICY[name] == ENOSYS


def test_a_rename_leaves_no_device_behind() -> None:
    renames = POLICY["renameat2"]
    assert isinstance(renames, ArgRule)
    assert {renames.judge((3, 0, 3, 0, flags, 0)) for flags in (0, 1, 2)} == {ALLOW}
    assert {renames.judge((3, 0, 3, 0, flags, 0)) for flags in (4, 5)} == {verdicts.EINVAL}


def test_a_program_may_confine_itself_further() -> None:
    assert {POLICY[name] for name in POLICY if name.startswith("landlock_")} == {ALLOW}
    seccomp, prctl = POLICY["seccomp"], POLICY["prctl"]
    assert isinstance(seccomp, ArgRule) and isinstance(prctl, ArgRule)
    set_mode_filter, pr_set_seccomp, pr_set_no_new_privs, tsync = 1, 22, 38, 1
    assert prctl.judge((pr_set_no_new_privs, 1, 0, 0, 0, 0)) == ALLOW
    assert prctl.judge((pr_set_seccomp, 1, 0, 0, 0, 0)) == seccomp.judge((0, 0, 0, 0, 0, 0)) == ALLOW, "strict mode"
    # Filters are counted.
    assert {seccomp.judge((set_mode_filter, flags, 0, 0, 0, 0)).action for flags in (0, tsync)} == {"notify"}
    assert prctl.judge((pr_set_seccomp, 2, 0, 0, 0, 0)).action == "notify"
