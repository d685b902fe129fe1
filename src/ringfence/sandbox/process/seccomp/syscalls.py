"""System call numbers by name, for the machines that a box can run on.

A line is its first number and the names that follow it upwards. Since 2019 new calls get one number on every machine.
Calls that no longer exist are named too, so that a refusal can name them. Complete up to Linux 7.2; what comes
later is unknown here and therefore absent in a box.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ringfence.core.errors import Unavailable

_X86_64 = """
  0 read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
 15 rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
 29 shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept
 44 sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt getsockopt
 56 clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock
 74 fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink
 89 readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid
103 syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups
116 setgroups setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending
128 rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib personality ustat statfs fstatfs
139 sysfs getpriority setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler
146 sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall vhangup
154 modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync acct settimeofday mount umount2
167 swapon swapoff reboot sethostname setdomainname iopl ioperm create_module init_module delete_module
177 get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid readahead
188 setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr
198 lremovexattr fremovexattr tkill time futex sched_setaffinity sched_getaffinity set_thread_area io_setup
207 io_destroy io_getevents io_submit io_cancel get_thread_area lookup_dcookie epoll_create epoll_ctl_old
215 epoll_wait_old remap_file_pages getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create
223 timer_settime timer_gettime timer_getoverrun timer_delete clock_settime clock_gettime clock_getres
230 clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes vserver mbind set_mempolicy get_mempolicy mq_open
241 mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr kexec_load waitid add_key request_key keyctl
251 ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat
260 fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll
272 unshare set_robust_list get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait
282 signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2
291 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init
301 fanotify_mark prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu
310 process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom
319 memfd_create kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2
329 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq uretprobe uprobe
"""

_AARCH64 = """
  0 io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
 11 listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie eventfd2
 20 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch ioctl
 30 ioprio_set ioprio_get flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2 mount pivot_root
 42 nfsservctl statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat
 55 fchown openat close vhangup pipe2 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv
 70 pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync fdatasync
 84 sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat acct capget capset personality exit
 94 exit_group waitid set_tid_address unshare futex set_robust_list get_robust_list nanosleep getitimer setitimer
104 kexec_load init_module delete_module timer_create timer_gettime timer_getoverrun timer_settime timer_delete
112 clock_settime clock_gettime clock_getres clock_nanosleep syslog ptrace sched_setparam sched_setscheduler
120 sched_getscheduler sched_getparam sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max
126 sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend
134 rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority
142 reboot setregid setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid
155 getpgid getsid setsid getgroups setgroups uname sethostname setdomainname getrlimit setrlimit getrusage umask
167 prctl getcpu gettimeofday settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid sysinfo
180 mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd semget
191 semctl semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept connect getsockname
205 getpeername sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key
218 request_key keyctl clone execve mmap fadvise64 swapon swapoff mprotect msync mlock munlock mlockall munlockall
232 mincore madvise remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo
241 perf_event_open accept4 recvmmsg
260 wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs setns
269 sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp
278 getrandom memfd_create bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2
288 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load
"""

_EVERYWHERE = """
424 pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig fsmount
433 fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr
443 quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret process_mrelease
449 futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue
457 statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal setxattrat getxattrat
465 listxattrat removexattrat open_tree_attr file_getattr file_setattr listns rseq_slice_yield
"""


def _numbers(*tables: str) -> Mapping[str, int]:
    numbers: dict[str, int] = {}
    for line in "\n".join(tables).split("\n"):
        first, *names = line.split() or ["0"]
        numbers.update((name, int(first) + offset) for offset, name in enumerate(names))
    return MappingProxyType(numbers)


NUMBERS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"x86_64": _numbers(_X86_64, _EVERYWHERE), "aarch64": _numbers(_AARCH64, _EVERYWHERE)}
)
"""By machine, as `uname` calls it."""

_NAMES = {machine: {number: name for name, number in numbers.items()} for machine, numbers in NUMBERS.items()}


def numbers_of(machine: str) -> Mapping[str, int]:
    """The numbers of all known calls. Raises Unavailable for a machine that no box runs on."""
    try:
        return NUMBERS[machine]
    except KeyError:
        raise Unavailable("machine", f"boxes run on {' and '.join(NUMBERS)}, not on {machine}") from None


def name_of(machine: str, number: int) -> str:
    """What a call is named in facts."""
    numbers_of(machine)
    return _NAMES[machine].get(number, f"syscall_{number}")
