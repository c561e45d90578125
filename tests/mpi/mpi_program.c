/* A program that mpirun starts, for tests of the backend mpi: mpi_program CASE. tests/mpi/run_mpi.py runs its cases. */
#include "mpi_cases.h"
#include "runner.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"suite", mpi_case_suite},
    {"reductions", mpi_case_reductions},
    {"moves", mpi_case_moves},
    {"messages", mpi_case_messages},
    {"groups", mpi_case_groups},
    {"devices", mpi_case_devices},
    {"mismatch", mpi_case_mismatch},
    {"late", mpi_case_late},
    {"abort", mpi_case_abort},
    {"dead", mpi_case_dead},
    {"dead_inside", mpi_case_dead_inside},
    {"alone", mpi_case_alone},
    {"threads", mpi_case_threads},
    {"native", mpi_case_native},
    {"training", mpi_case_training},
};

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int a = 1; a < argc; a++) {
        size_t i = 0;
        while (i < sizeof cases / sizeof *cases && strcmp(cases[i].name, argv[a]) != 0)
            i++;
        if (i == sizeof cases / sizeof *cases)
            return fprintf(stderr, "mpi_program: there is no case %s\n", argv[a]), 2;
        cases[i].run();
    }
    return 0;
}
