/* The commands of tdrun beside starting a job. Each takes its own arguments, argv[0] being its name, and
 * returns the exit code. */
#ifndef TD_LAUNCH_COMMANDS_H
#define TD_LAUNCH_COMMANDS_H

typedef int (*td__command_fn)(int argc, char **argv);

/** The command of this name, or NULL. */
td__command_fn td__command_find(const char *name);

/** tdrun status [--json] [--watch [SECONDS]] [--all] [PID] */
int td__status_command(int argc, char **argv);

/** tdrun postmortem [--json] FILE... */
int td__postmortem_command(int argc, char **argv);

#endif
