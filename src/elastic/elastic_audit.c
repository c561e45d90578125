/* The record of which samples were used: a line for each slice of each committed step.
 *
 *     step 17 slice 3 rank 1 epoch 0: 4711 812 90 …
 *
 * Each committed step must be there once, whoever dies. The first of the ranks that compute writes the lines of a step when it
 * is settled, and before the next one is. It may die before that, or after; so the rank that is the first one then reads the
 * end of the file, and writes the last settled step if that is missing. No other can be: nobody has the outcome of the next
 * step before the dead rank has computed its part of it. Where a state is divided, a step is settled when the next one is
 * computed, and two can be missing. What a rank that died in the middle of a write has left is cut off. */
#include "base/fail.h"
#include "elastic/elastic_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Who has computed the slices of a step. */
struct owners {
    int64_t step; /* -1: none */
    int *ranks, count;
};

enum { STEPS_KNOWN = 2 };

struct td__audit {
    char *path;
    int fd;
    bool looked;                      /* at the end of the file, since the ranks have changed */
    int64_t last;                     /* the last step in it */
    struct owners known[STEPS_KNOWN]; /* by step modulo their number */
    char *text;                       /* room for the lines of a step */
    size_t room;
};

td_status td__audit_open(const char *path, struct td__audit **audit_out)
{
    struct td__audit *audit = calloc(1, sizeof *audit);
    if (!audit || !(audit->path = strdup(path))) {
        free(audit);
        return td__fail_nomem("td_elastic_create");
    }
    audit->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (audit->fd < 0) {
        td_fail(TD_ERR_SYSTEM, "td_elastic_create: the record %s cannot be written: %s", path,
                td__errno_text(errno));
        free(audit->path);
        free(audit);
        return TD_ERR_SYSTEM;
    }
    for (int i = 0; i < STEPS_KNOWN; i++)
        audit->known[i].step = -1;
    *audit_out = audit;
    return TD_OK;
}

void td__audit_close(struct td__audit *audit)
{
    if (!audit)
        return;
    close(audit->fd);
    free(audit->path);
    free(audit->text);
    for (int i = 0; i < STEPS_KNOWN; i++)
        free(audit->known[i].ranks);
    free(audit);
}

static td_status fail_file(const struct td__audit *audit)
{
    return td_fail(TD_ERR_SYSTEM, "td_elastic: the record %s: %s", audit->path,
                   td__errno_text(errno));
}

/* ---- The end of the file --------------------------------------------------------------------------------------- */

/* The last step that is there with all its slices; cuts off what is behind it. */
static td_status parse(struct td__audit *audit, char *text, size_t size, int slices)
{
    size_t keep = 0;
    int in_step = 0;
    int64_t step, current = -1;
    audit->last = -1;
    for (char *line = text, *end; (end = memchr(line, '\n', size - (size_t)(line - text)));
         line = end + 1) {
        if (sscanf(line, "step %" SCNd64, &step) != 1)
            continue;
        in_step = step == current ? in_step + 1 : 1;
        current = step;
        if (in_step == slices) {
            audit->last = step;
            keep = (size_t)(end + 1 - text);
        }
    }
    return ftruncate(audit->fd, (off_t)keep) ? fail_file(audit) : TD_OK;
}

static td_status look(struct td__audit *audit, int slices)
{
    struct stat at;
    if (fstat(audit->fd, &at))
        return fail_file(audit);
    size_t size = (size_t)at.st_size, done = 0;
    char *text = malloc(size + 1);
    if (!text)
        return td__fail_nomem("td_elastic: the record");
    while (done < size) {
        ssize_t more = pread(audit->fd, text + done, size - done, (off_t)done);
        if (more <= 0)
            break;
        done += (size_t)more;
    }
    text[done] = 0;
    td_status status = done < size ? fail_file(audit) : parse(audit, text, size, slices);
    free(text);
    audit->looked = !status;
    return status;
}

/* ---- Writing ---------------------------------------------------------------------------------------------------- */

td_status td__audit_computed(td_elastic *elastic, int64_t step)
{
    struct td__audit *audit = elastic->audit;
    if (!audit)
        return TD_OK;
    struct owners *owners = &audit->known[step % STEPS_KNOWN];
    if (owners->count != elastic->slices) {
        int *ranks = realloc(owners->ranks, (size_t)elastic->slices * sizeof *ranks);
        if (!ranks)
            return td__fail_nomem("td_elastic: the record");
        owners->ranks = ranks;
        owners->count = elastic->slices;
    }
    for (int r = 0, active = 0; r < elastic->size; r++) {
        if (!elastic->active_ranks[r])
            continue;
        struct td__elastic_share share = td__elastic_share(elastic, active++);
        for (int i = 0; i < share.count; i++)
            owners->ranks[share.first + i * share.stride] = elastic->ranks[r];
    }
    owners->step = step;
    return TD_OK;
}

static td_status describe(td_elastic *elastic, int64_t step, size_t *length)
{
    struct td__audit *audit = elastic->audit;
    int64_t size = elastic->samples ? elastic->options.slice_size : 0;
    const int64_t *indices = elastic->samples ? td__samples_of_step(elastic, step) : NULL;
    if (elastic->samples && !indices)
        return td__error_status();
    size_t room = (size_t)elastic->slices * (96 + 21 * (size_t)size);
    if (room > audit->room) {
        char *grown = realloc(audit->text, room);
        if (!grown)
            return td__fail_nomem("td_elastic: the record");
        audit->text = grown;
        audit->room = room;
    }
    *length = 0;
    for (int k = 0; k < elastic->slices; k++) {
        *length += (size_t)sprintf(
            audit->text + *length, "step %" PRId64 " slice %d rank %d epoch %" PRId64 ":", step, k,
            audit->known[step % STEPS_KNOWN].ranks[k], td__samples_epoch(elastic, step));
        for (int64_t i = 0; i < size; i++)
            *length += (size_t)sprintf(audit->text + *length, " %" PRId64, indices[k * size + i]);
        audit->text[(*length)++] = '\n';
    }
    return TD_OK;
}

static td_status write_step(td_elastic *elastic, int64_t step)
{
    struct td__audit *audit = elastic->audit;
    size_t length = 0;
    TD_TRY(describe(elastic, step, &length));
    off_t end = lseek(audit->fd, 0, SEEK_END);
    for (size_t done = 0; done < length;) {
        ssize_t more = pwrite(audit->fd, audit->text + done, length - done, end + (off_t)done);
        if (more < 0)
            return fail_file(audit);
        done += (size_t)more;
    }
    audit->last = step;
    return TD_OK;
}

td_status td__audit_committed(td_elastic *elastic)
{
    struct td__audit *audit = elastic->audit;
    int64_t settled = atomic_load(&elastic->settled);
    if (!audit || elastic->active_rank != 0)
        return TD_OK;
    for (int64_t step = settled - STEPS_KNOWN; step < settled; step++) {
        if (step < 0 || audit->known[step % STEPS_KNOWN].step != step)
            continue;
        if (!audit->looked)
            TD_TRY(look(audit, elastic->slices));
        if (step > audit->last)
            TD_TRY(write_step(elastic, step));
    }
    return TD_OK;
}

td_status td__audit_regroup(td_elastic *elastic)
{
    if (!elastic->audit)
        return TD_OK;
    elastic->audit->looked = false;
    return td__audit_committed(elastic);
}
