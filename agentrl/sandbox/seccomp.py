"""The system-call filter of the sandbox, assembled by hand as classic BPF (seccomp(2), linux/seccomp.h).

Namespaces already hide the host's network, processes and files. The filter takes away what they leave: sockets of
every family (Unix sockets and UDP included), tracing, new namespaces and mounts, kernel key rings, io_uring (which
would open sockets without the socket call), and memory that no limit counts (memfd, System V segments).

One kind of socket stays: a connected pair of Unix streams, which asyncio needs for its own wake-ups and which cannot
reach anything that its owner did not already hold.
"""

from __future__ import annotations

import errno
import platform
import struct

from agentrl.errors import MissingError

_RET_ALLOW = 0x7FFF0000
_RET_KILL = 0x80000000
_RET_ERRNO = 0x00050000

_LOAD = 0x20  # A = 32-bit word of seccomp_data at offset k
_JUMP_EQ = 0x15
_JUMP_GE = 0x35
_JUMP_SET = 0x45
_AND = 0x54
_RETURN = 0x06

_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16

_CLONE_NEW_ANY = 0x7E020000  # user, mount, PID, network, IPC, UTS and cgroup namespaces
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF
_PR_SET_PDEATHSIG = 1
_LAST_KNOWN_NR = 466  # later calls answer ENOSYS: nobody has looked at them

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (x86_64, aarch64); None where the architecture has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "fanotify_init": (300, 262),
    "vhangup": (153, 58),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKETPAIR, _SENDTO, _PRCTL = (53, 199), (44, 206), (157, 167)


def _op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, k)


def _load_arg(index: int, high: bool = False) -> bytes:
    return _op(_LOAD, _OFFSET_ARGS + 8 * index + (4 if high else 0))


def _when(nr: int, *body: bytes) -> bytes:
    """`body` runs for the call `nr` and must return; other calls skip it with their number still loaded."""
    return _op(_JUMP_EQ, nr, 0, len(body)) + b"".join(body)


def build_filter(machine: str | None = None) -> bytes:
    """The BPF program for `machine` (default: this one), as `bwrap --seccomp FD` reads it.

    Denied calls answer EPERM, so a program sees an ordinary error. A call of another architecture's table
    (32-bit `int 0x80`) kills the process.

    Raises:
        MissingError: the architecture is neither x86_64 nor aarch64.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise MissingError(
            f"the sandbox has no system-call filter for {machine}", "run model-written code on x86_64 or aarch64"
        )
    column = list(_AUDIT_ARCH).index(machine)
    allow, deny = _op(_RETURN, _RET_ALLOW), _op(_RETURN, _RET_ERRNO | errno.EPERM)
    no_such_call = _op(_RETURN, _RET_ERRNO | errno.ENOSYS)
    program = [
        _op(_LOAD, _OFFSET_ARCH),
        _op(_JUMP_EQ, _AUDIT_ARCH[machine], 1, 0),
        _op(_RETURN, _RET_KILL),
        _op(_LOAD, _OFFSET_NR),
        _op(_JUMP_GE, _LAST_KNOWN_NR + 1, 0, 1),  # the x32 table starts at 2**30, so it ends here too
        no_such_call,
        _when(_CLONE[column], _load_arg(0), _op(_JUMP_SET, _CLONE_NEW_ANY, 0, 1), deny, allow),
        _when(_CLONE3[column], no_such_call),  # its flags lie in memory; the C library falls back to clone
        _when(
            _SOCKETPAIR[column],
            _load_arg(0),
            _op(_JUMP_EQ, _AF_UNIX, 0, 4),
            _load_arg(1),
            _op(_AND, _SOCK_TYPE_MASK),
            _op(_JUMP_EQ, _SOCK_STREAM, 0, 1),
            allow,
            deny,
        ),
        _when(  # to a connected peer only: an address must be null
            _SENDTO[column],
            _load_arg(4),
            _op(_JUMP_EQ, 0, 0, 3),
            _load_arg(4, high=True),
            _op(_JUMP_EQ, 0, 0, 1),
            allow,
            deny,
        ),
        # Dying with the parent is how the sandbox ends when the host does: nobody inside may undo it.
        _when(_PRCTL[column], _load_arg(0), _op(_JUMP_EQ, _PR_SET_PDEATHSIG, 0, 1), deny, allow),
    ]
    program += [_when(nr, deny) for nrs in _DENIED.values() if (nr := nrs[column]) is not None]
    return b"".join([*program, allow])
