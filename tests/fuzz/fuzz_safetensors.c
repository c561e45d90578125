/* Safetensors files.
 *
 *     byte 0   bit 0   what follows is a whole file
 *              else    … is the text of a header, and as many bytes of data are put behind it as bytes 1
 *                      and 2 say: a fuzzer seldom finds the right length by itself
 *
 * Whatever is in a file, it is read or refused with its name. What is read fits the file, and is the same
 * again after it was written and read once more. */
#include "fuzz.h"

#include <tandem/checkpoint.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LONGEST = 1 << 16 };

static void check(bool condition)
{
    if (!condition)
        abort();
}

static td_state *read_file(const void *data, size_t size)
{
    const char *path = fuzz_file(data, size);
    td_state *state = td_load_safetensors(path, NULL);
    check(state || strstr(td_last_error(), path));
    return state;
}

static void check_again(const td_state *state)
{
    static char path[64];
    if (!*path)
        snprintf(path, sizeof path, "/dev/shm/tandem-fuzz-%d", (int)getpid());
    check(!td_save_safetensors(path, state, NULL, 0));
    td_state *again = td_load_safetensors(path, NULL);
    unlink(path);
    check(again && td_state_count(again) == td_state_count(state));
    for (int i = 0; i < td_state_count(state); i++) {
        const td_tensor *x = td_state_tensor(state, i), *y = td_state_tensor(again, i);
        size_t bytes = td_tensor_nbytes(x);
        check(!strcmp(td_state_name(state, i), td_state_name(again, i)));
        check(td_tensor_dtype(x) == td_tensor_dtype(y) && bytes == td_tensor_nbytes(y));
        if (bytes && td_tensor_dtype(x) != TD_BOOL)
            check(!memcmp(td_tensor_data(x), td_tensor_data(y), bytes));
    }
    td_state_destroy(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t file[8 + 2 * LONGEST];
    if (size < 3 || size > LONGEST)
        return 0;
    const uint8_t *rest = data + 3;
    uint64_t length = size - 3;
    size_t used = size - 1;
    if (data[0] & 1) {
        memcpy(file, data + 1, used);
    } else {
        size_t data_size = data[1] + ((size_t)data[2] << 8);
        memcpy(file, &length, 8);
        memcpy(file + 8, rest, length);
        memset(file + 8 + length, 0x55, data_size);
        used = 8 + length + data_size;
    }
    td_state *state = read_file(file, used);
    if (state)
        check_again(state);
    td_state_destroy(state);
    return 0;
}
