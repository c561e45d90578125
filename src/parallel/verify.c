/* All ranks all-gather a fingerprint of their list. Only if they differ, rank 0 broadcasts its
 * list, each rank finds its first difference, and all report that of the lowest rank. */
#include "parallel/buckets.h"

#include "base/buffer.h"
#include "base/fail.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE = 256 };

static void describe(const struct td__gradient *gradients, const char *const *names, int i,
                     char *line)
{
    char number[16];
    snprintf(number, sizeof number, "%d", i);
    snprintf(line, LINE, "%.120s %s %s", names ? names[i] : number,
             td_dtype_name(gradients[i].dtype),
             td__shape_text(gradients[i].shape, gradients[i].ndim));
}

/* All lines, each LINE bytes long. */
static char *describe_all(const struct td__gradient *gradients, const char *const *names, int count)
{
    char *text = calloc((size_t)count + 1, LINE);
    for (int i = 0; i < count && text; i++)
        describe(gradients, names, i, text + (size_t)i * LINE);
    return text;
}

static int64_t fingerprint(const char *text, int count)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325) ^ (uint64_t)count;
    for (size_t i = 0; i < (size_t)count * LINE; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return (int64_t)hash;
}

/* The first difference between this rank's list and the first rank's as an error text; "" if they
 * agree. */
static void find_difference(char *sentence, size_t capacity, int first, int rank, const char *mine,
                            int my_count, const td_bytes *theirs)
{
    int count = (int)(theirs->size / LINE);
    sentence[0] = '\0';
    for (int i = 0; i < count && i < my_count; i++)
        if (memcmp(theirs->data + (size_t)i * LINE, mine + (size_t)i * LINE, LINE)) {
            snprintf(sentence, capacity,
                     "rank %d and rank %d have different parameters: parameter %d is \"%.*s\" on "
                     "rank %d and \"%.*s\" on rank %d",
                     first, rank, i, LINE, theirs->data + (size_t)i * LINE, first, LINE,
                     mine + (size_t)i * LINE, rank);
            return;
        }
    if (count != my_count) {
        const char *more = count > my_count ? theirs->data + (size_t)my_count * LINE
                                            : mine + (size_t)count * LINE;
        snprintf(sentence, capacity,
                 "rank %d has %d parameters, rank %d has %d; \"%.*s\" is on rank %d only", first,
                 count, rank, my_count, LINE, more, count > my_count ? first : rank);
    }
}

static td_status report(const char *call, const char *mine, int count, td_group *group)
{
    int size = td_get_world_size(group), first = td_get_global_rank(group, 0);
    td_bytes theirs = {.data = (char *)mine, .size = (size_t)count * LINE};
    bool is_first = td_get_group_rank(group, td_get_rank(NULL)) == 0;
    if (!is_first)
        theirs = (td_bytes){0};
    TD_TRY(td_broadcast_object_list(&theirs, 1, first, group));
    char sentence[900];
    find_difference(sentence, sizeof sentence, first, td_get_rank(NULL), mine, count, &theirs);
    if (!is_first || theirs.data != mine)
        td_bytes_free(&theirs);
    td_bytes *all = calloc((size_t)size, sizeof *all);
    if (!all)
        return td__fail_nomem(call);
    td_status status = td_all_gather_object(
        all, size, (td_bytes){.data = sentence, .size = strlen(sentence)}, group);
    const char *found = "the ranks have different parameters";
    for (int r = size - 1; r >= 0 && !status; r--)
        if (all[r].size)
            found = all[r].data;
    if (!status)
        status = td_fail(TD_ERR_MISMATCH, "%s: %s; every rank must have the same model", call,
                         found);
    for (int r = 0; r < size; r++)
        td_bytes_free(&all[r]);
    free(all);
    return status;
}

td_status td__verify_gradients(const char *call, const struct td__gradient *gradients,
                               const char *const *names, int count, td_group *group)
{
    int size = td_get_world_size(group);
    if (size <= 1)
        return TD_OK;
    char *text = describe_all(gradients, names, count);
    int64_t *marks = calloc((size_t)size, sizeof *marks);
    td_status status = text && marks ? TD_OK : td__fail_nomem(call);
    if (!status) {
        int64_t mine = fingerprint(text, count);
        status = td_group_all_gather(marks, &mine, 1, TD_I64, group, NULL);
        bool same = true;
        for (int r = 1; r < size; r++)
            same = same && marks[r] == marks[0];
        if (!status && !same)
            status = report(call, text, count, group);
    }
    free(marks);
    free(text);
    return status;
}
