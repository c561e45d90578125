/* The list of tdrun --hosts, Slurm's counts of tasks, and control lines of a launcher on another host: the first byte
 * chooses. */
#include "fuzz.h"

#include "base/text.h"
#include "launch/hosts.h"
#include "launch/worker.h"
#include "store/slurm.h"

#include <stdlib.h>
#include <string.h>

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void parse_list(const char *text)
{
    struct td__hosts hosts = {0};
    if (!td__hosts_parse(text, &hosts)) {
        check(hosts.count > 0);
        for (int i = 0; i < hosts.count; i++) {
            const char *target = hosts.at[i].target;
            check(*target && *target != '-' && !strpbrk(target, " ;'\"`$&|<>\n"));
            check(hosts.at[i].address >= target && hosts.at[i].address < target + 256);
        }
    }
    td__hosts_free(&hosts);
}

static void read_step(const char *text)
{
    struct td__slurm_step step;
    bool inside;
    setenv("SLURM_STEP_ID", "0", 1);
    setenv("SLURM_STEP_NUM_NODES", "5", 1);
    setenv("SLURM_STEP_NUM_TASKS", "9", 1);
    setenv("SLURM_NODEID", "3", 1);
    setenv("SLURM_PROCID", "7", 1);
    setenv("SLURM_STEP_TASKS_PER_NODE", text, 1);
    check(!td__slurm_step_read(&step, &inside) && inside && step.tasks_here > 0);
}

static void take_lines(const char *text, size_t size)
{
    struct td__host host = {.target = "b", .address = "b"};
    struct td__worker worker = {.host = &host};
    for (const char *end = text + size; text < end;) {
        const char *newline = memchr(text, '\n', (size_t)(end - text));
        const char *stop = newline ? newline : end;
        td__hosts_take_control(&worker, text, (size_t)(stop - text));
        text = stop + 1;
    }
    check(memchr(worker.refusal, 0, sizeof worker.refusal) &&
          memchr(worker.note, 0, sizeof worker.note));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size || size > 4096)
        return 0;
    char *text = td__text_copy(data + 1, size - 1);
    if (!text)
        return 0;
    if (data[0] % 3 == 0)
        parse_list(text);
    else if (data[0] % 3 == 1)
        read_step(text);
    else
        take_lines(text, strlen(text));
    free(text);
    return 0;
}
