/* What every fuzz target defines. libFuzzer calls it with made-up inputs (scripts/fuzz), and
 * replay_main.c with the seeds of corpus/<name>/. */
#ifndef TANDEM_TESTS_FUZZ_H
#define TANDEM_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/** Handles one input, which may be anything. Returns 0; a finding is a crash (abort() included). */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
