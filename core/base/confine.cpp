#include "base/confine.hpp"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace kvlab::confine {
namespace {

constexpr int report_to = 3;

[[noreturn]] void fail(Step step, int error = errno) {
  const Report report{step, error};
  if (write(report_to, &report, sizeof report) < 0) _exit(126);
  _exit(125);
}

void want(bool good, Step step) {
  if (!good) fail(step);
}

// Leaves input, output twice and the report, as 0 to 3, and closes all others. A lock that kvlab holds is not held
// here.
void take_descriptors(const Plan& plan) {
  want(dup2(plan.report, report_to) >= 0, child);
  want(dup2(plan.input, 0) >= 0 && dup2(plan.output, 1) >= 0 && dup2(plan.output, 2) >= 0, child);
  want(fcntl(report_to, F_SETFD, FD_CLOEXEC) == 0, child);
  want(syscall(SYS_close_range, report_to + 1, ~0u, 0) == 0, child);
}

// The signal of kvlab's end is not sent for an end before the request. Then nobody reads the report any more.
void end_with_kvlab(Step step) {
  want(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) == 0, step);
  pollfd report{report_to, 0, 0};
  if (poll(&report, 1, 0) > 0 && (report.revents & POLLERR)) _exit(126);
}

void reset_signals() {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  struct sigaction usual {};
  usual.sa_handler = SIG_DFL;
  for (int number = 1; number < 32; ++number) sigaction(number, &usual, nullptr);
}

void write_file(const char* path, const std::string& text) {
  const int file = open(path, O_WRONLY | O_CLOEXEC);
  want(file >= 0 && write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size()), users);
  close(file);
}

// mount_setattr(2); the headers of glibc and of Linux do not go together.
struct Attributes {
  std::uint64_t set = 0, clear = 0, propagation = 0, user = 0;
};
constexpr std::uint64_t read_only = 1, no_set_id = 2;

void show(const Shown& what) {
  if (what.folder)
    want(mkdir(what.to.c_str(), 0755) == 0 || errno == EEXIST, showing);
  else
    want(close(open(what.to.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644)) == 0, showing);
  want(mount(what.from.c_str(), what.to.c_str(), nullptr, MS_BIND | MS_REC, nullptr) == 0, showing);
  const Attributes closed{.set = read_only | no_set_id};
  want(syscall(SYS_mount_setattr, AT_FDCWD, what.to.c_str(), AT_RECURSIVE, &closed, sizeof closed) == 0, showing);
}

// Makes a root in memory that has what is shown, and one folder that can be written.
void change_root(const Plan& plan) {
  constexpr unsigned long kept = MS_NOSUID | MS_NODEV;
  umask(0022);
  want(mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0, mounts);
  want(mount("tmpfs", base, "tmpfs", kept, "mode=755,size=1m") == 0 && chdir(base) == 0, mounts);
  want(mkdir(old_root + 1, 0700) == 0 && syscall(SYS_pivot_root, ".", old_root + 1) == 0 && chdir("/") == 0, mounts);
  want(mkdir(base, 0755) == 0 && mount("tmpfs", base, "tmpfs", kept, plan.room.c_str()) == 0, mounts);
  for (const std::string& folder : plan.folders) want(mkdir(folder.c_str(), 0755) == 0 || errno == EEXIST, mounts);
  for (const Shown& what : plan.shown) show(what);
  for (const auto& [place, text] : plan.links) want(symlink(text.c_str(), place.c_str()) == 0, showing);
  want(umount2(old_root, MNT_DETACH) == 0 && rmdir(old_root) == 0, leaving);
  want(mount(nullptr, "/", nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY | kept, nullptr) == 0, leaving);
  want(chdir(base) == 0, leaving);
}

// glibc would set the ids of threads that are not here.
void give_up_rights(const Plan& plan) {
  if (plan.root) {
    want(syscall(SYS_setgroups, 0, nullptr) == 0, rights);
    want(syscall(SYS_setresgid, nobody, nobody, nobody) == 0, rights);
    want(syscall(SYS_setresuid, nobody, nobody, nobody) == 0, rights);
    syscall(SYS_unshare, CLONE_NEWUSER);  // where it can be had: processes are counted by users
  }
  want(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, rights);
  end_with_kvlab(rights);  // another user's id has dropped it
  want(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0, rights);
}

void limit(int what, unsigned long most) {
  const rlimit both{most, most};
  want(setrlimit(static_cast<__rlimit_resource>(what), &both) == 0, limits);
}

constexpr unsigned refused[] = {
    // They reach other programs, or the kernel's rarer parts.
    SYS_socket,
    SYS_io_uring_setup,
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_bpf,
    SYS_perf_event_open,
    SYS_userfaultfd,
    SYS_add_key,
    SYS_keyctl,
    SYS_request_key,
    // They change namespaces. In a user's own one a program has all rights again.
    SYS_unshare,
    SYS_setns,
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_fsopen,
    SYS_fsconfig,
    SYS_fsmount,
    SYS_fspick,
    SYS_move_mount,
    SYS_open_tree,
    SYS_mount_setattr,
#ifdef SYS_open_tree_attr
    SYS_open_tree_attr,
#endif
    // They take memory that no limit counts.
    SYS_memfd_create,
#ifdef SYS_memfd_secret
    SYS_memfd_secret,
#endif
    SYS_shmget,
    SYS_msgget,
    SYS_semget,
    SYS_mq_open,
};
constexpr unsigned new_namespaces = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER |
                                    CLONE_NEWPID | CLONE_NEWNET | 0x80;  // 0x80: CLONE_NEWTIME

// clone3 keeps its flags where a filter cannot read them. The C library then takes clone, but only after ENOSYS.
void refuse_calls() {
#if defined(__x86_64__)
  constexpr unsigned machine = AUDIT_ARCH_X86_64, largest = 0x3fffffff;  // above: the calls of another ABI
#elif defined(__aarch64__)
  constexpr unsigned machine = AUDIT_ARCH_AARCH64, largest = 0xffffffff;
#endif
  constexpr std::size_t count = sizeof refused / sizeof *refused, last = count + 8;
  constexpr std::size_t allow = last, refuse = last + 1, unknown = last + 2;
  const auto jump = [](std::size_t from, std::size_t to) { return static_cast<unsigned char>(to - from - 1); };
  sock_filter code[last + 3] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, arch)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, machine, 0, jump(1, refuse)),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, largest, jump(3, refuse), 0),
  };
  for (std::size_t i = 0; i < count; ++i)
    code[4 + i] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, refused[i], jump(4 + i, refuse), 0);
  code[last - 4] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, jump(last - 4, unknown), 0);
  code[last - 3] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, jump(last - 3, allow));
  code[last - 2] = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0]));  // its flags
  code[last - 1] = BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, new_namespaces, jump(last - 1, refuse), 0);
  code[allow] = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  code[refuse] = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
  code[unknown] = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS);
  const sock_fprog program{sizeof code / sizeof *code, code};
  want(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0, calls);
}

[[noreturn]] void start_program(const Plan& plan) {
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_AS, plan.memory);
  limit(RLIMIT_FSIZE, plan.storage);
  limit(RLIMIT_NOFILE, 256);
  limit(RLIMIT_CPU, plan.seconds);
  limit(RLIMIT_NPROC, plan.processes);
  refuse_calls();
  execve(plan.program.c_str(), plan.words.data(), plan.variables.data());
  fail(start);
}

}  // namespace

const char* name_of(int step) {
  constexpr const char* names[] = {"nothing",
                                   "a user of its own",
                                   "a root of its own",
                                   "a view of the system's programs",
                                   "a root without the system's files",
                                   "a process without rights",
                                   "limits",
                                   "a filter of calls",
                                   "a process of its own",
                                   "the program"};
  return step >= 0 && step <= start ? names[step] : "nothing known";
}

void run(const Plan& plan) {
  take_descriptors(plan);
  reset_signals();
  want(setsid() >= 0, child);  // Ctrl-C is kvlab's alone
  end_with_kvlab(child);
  if (!plan.root) {
    write_file("/proc/self/setgroups", "deny");
    write_file("/proc/self/uid_map", plan.user_map);
    write_file("/proc/self/gid_map", plan.group_map);
  }
  change_root(plan);
  give_up_rights(plan);
  const auto program = static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
  want(program >= 0, child);
  if (program == 0) start_program(plan);
  for (int i = 0; i < report_to; ++i) close(i);
  // This is the first process of its namespace: orphans are its children, and all end with it.
  int status = 0;
  for (pid_t ended = 0; ended != program;) {
    ended = waitpid(-1, &status, 0);
    want(ended >= 0 || errno == EINTR, child);
  }
  const Report report{nothing, status};
  _exit(write(report_to, &report, sizeof report) == sizeof report ? 0 : 126);
}

}  // namespace kvlab::confine
