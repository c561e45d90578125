/* The cases of mpi_program.c. Each begins and ends its own world. */
#ifndef TANDEM_TESTS_MPI_CASES_H
#define TANDEM_TESTS_MPI_CASES_H

#include <tandem/tandem.h>

void mpi_case_suite(void), mpi_case_reductions(void), mpi_case_moves(void), mpi_case_messages(void),
    mpi_case_groups(void), mpi_case_devices(void), mpi_case_mismatch(void), mpi_case_late(void),
    mpi_case_abort(void), mpi_case_dead(void), mpi_case_dead_inside(void), mpi_case_alone(void),
    mpi_case_threads(void), mpi_case_native(void), mpi_case_training(void);

/** A world of the backend mpi; its options are those of MPI_TEST_OPTIONS. */
void mpi_begin(int64_t timeout_ms);
void mpi_end(void);

#endif
