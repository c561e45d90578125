/* What the tools say about this installation: `tdrun doctor`, and the devices, which `tdbench --devices` prints, too. */
#ifndef TOOLS_DOCTOR_H
#define TOOLS_DOCTOR_H

#include <stdbool.h>

/** The command `tdrun doctor`; argv[0] is its name. Returns the exit code: 0, or 1 when something is broken. */
int doctor_run(int argc, char **argv);

/** One kind of device. `broken`: it cannot tell how many devices there are; the text says why. */
struct device_line {
    const char *kind;
    const char *text; /* "2 devices; NVIDIA H200, driver 12.4" */
    bool broken;
    bool absent; /* nothing is broken: the machine has no such device */
};

/** Calls `visit` for each kind of device, those of all plug-ins too. Initialises no device. */
void device_list(void (*visit)(const struct device_line *line, void *arg), void *arg);

#endif
