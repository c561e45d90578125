/* Both sides of td_spawn(): what the parent sends to a process that it has started, and what that does with it.
 *
 *     parent (spawn.c)                                child (spawn_child.c)
 *     fork(), or start the program again     ---->    forked: td__spawn_run(); else: main(), td_spawn_main()
 *                                            <----    one byte: it is here
 *     open the store; the orders             ---->    set the environment, find the function, call it
 *                                            <----    struct td__error as far as its text goes: how the function ended
 *
 * All of it goes through one pair of sockets a process, so that nothing of it, such as the job's secret, is in
 * arguments or in an environment that other processes can see. */
#ifndef TD_LAUNCH_SPAWN_H
#define TD_LAUNCH_SPAWN_H

#include "base/buffer.h"

#include <tandem/launch.h>

#include <limits.h>

/** A function, for another process that runs the same program: modules are at other addresses there. */
struct td__spawn_address {
    char module[PATH_MAX]; /* the shared object's file; "": the program itself */
    uint64_t fingerprint;  /* of the module */
    uint64_t offset;       /* from the address at which the module is loaded */
};

struct td__spawn_orders {
    uint64_t
        library; /* td__library_fingerprint(); first, since another build may have another struct */
    int rank;
    int count;
    int port;   /* of the store */
    int arg_fd; /* has a copy of `arg`, under this number in the child; -1: there is none */
    size_t arg_size;
    char secret[65]; /* "": the one in the environment */
    char flight[64];
    struct td__spawn_address function; /* for a process that was not forked */
};

/** The variable that has the number of the socket, in a process that was started by exec. */
#define TD__SPAWN_VARIABLE "TANDEM_SPAWN"

/** A forked child: waits for its orders at `link`, calls fn(rank, arg), reports and exits. `parent` is the pid of the
 *  process that called td_spawn(). */
_Noreturn void td__spawn_run(int link, pid_t parent, td_spawn_fn fn, void *arg);

/** Whether td_spawn_main() was called in this process or in one that it is a fork of. */
bool td__spawn_main_called(void);

/** Whether td_spawn() started this process by exec, and td_spawn_main() was not called yet. */
bool td__spawn_is_pending(void);

/** This program, to be started again. */
struct td__own_program {
    char path[PATH_MAX];
    char variable[32]; /* TD__SPAWN_VARIABLE, for the next start */
    struct td__buffer arguments;
    char **argv;
    char **envp;
};

td_status td__own_program_read(struct td__own_program *program);

/** Starts it as td__child_start() does, in this process group. The child gets `link` for td_spawn_main(), and `arg_fd`
 *  unless that is -1. */
int td__own_program_start(struct td__own_program *program, int link, int arg_fd, pid_t *pid,
                          const char **step);

void td__own_program_free(struct td__own_program *program);

/** TD_ERR_INVALID where `fn` is not in a module: code that was made at run time. */
td_status td__spawn_locate(td_spawn_fn fn, struct td__spawn_address *address);

/** Finds the function in this process, and loads its module where that is not loaded yet. TD_ERR_STATE where the module
 *  is another build here, or cannot be loaded. */
td_status td__spawn_find(const struct td__spawn_address *address, td_spawn_fn *fn);

/** Identifies the build of this library. */
uint64_t td__library_fingerprint(void);

#endif
