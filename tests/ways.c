/* Transports; see ways.h. */
#include "ways.h"

#include "runner.h"

#include <tandem/group.h>

#include <stdio.h>
#include <stdlib.h>

const struct way shm = {0}, tcp = {.transport = "tcp"}, mixed = {.hosts = "aabbccdd"};

void take_way(const struct way *way)
{
    char id[16];
    if (way->transport)
        setenv("TANDEM_TRANSPORT", way->transport, 1);
    if (way->hosts) {
        snprintf(id, sizeof id, "host %c", way->hosts[td_test_rank()]);
        setenv("TANDEM_HOST_ID", id, 1);
    }
}

void open_world(const struct way *way, int64_t timeout_ms)
{
    take_way(way);
    CHECK_OK(td_init_process_group(&(td_init_options){.timeout_ms = timeout_ms}));
}

float sum_on(td_group *group)
{
    float value = 1;
    CHECK_OK(td_group_all_reduce(&value, &value, 1, TD_F32, TD_SUM, group, NULL));
    return value;
}
