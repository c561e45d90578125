/* The agreement at the end of a step: one all_gather of a few dozen bytes from each rank.
 *
 * A rank enters it when the outcome of the step is complete in its memory. So a rank that has its result knows that all
 * have the outcome, and commits; and when it dies then, the others can. Beside that, a vote carries what the ranks decide
 * together, so that it costs no call of its own: hashes of parts of the weights before the step and of the outcome, whether
 * a signal has come, whether newcomers wait, and how long a slice took.
 *
 * Ranks with other hashes than more than half are the ones that differ. Nothing has been committed yet: they are excluded,
 * and the others repeat the step. */
#include "base/fail.h"
#include "base/text.h"
#include "checkpoint/stop_signals.h"
#include "elastic/elastic_internal.h"
#include "os/orders.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    STOP = 1,    /* a signal has come */
    CHECK = 2,   /* the program asks for a comparison of all weights */
    WAITING = 4, /* processes wait to be admitted */
    LEAVE = 8,   /* the launcher has this rank leave */
    STRAGGLER_STEPS = 20,
};

struct vote {
    int64_t step;
    uint64_t weights, outcome;
    int64_t slice_ns;
    uint32_t flags, reserved;
};

/* Whether all weights are compared in this step, and not a part of them: all ranks know it. A newcomer's are a copy. */
static bool compares_all(const td_elastic *elastic)
{
    int64_t every = elastic->options.check_every;
    return elastic->active_size < elastic->size || elastic->check_due ||
           (every > 0 && td__elastic_committed(elastic) % every == 0);
}

static td_status fill_vote(td_elastic *elastic, struct vote *vote)
{
    *vote = (struct vote){.step = td__elastic_committed(elastic), .slice_ns = elastic->slice_ns};
    if (td__stop_signal_came() || atomic_load(&elastic->stopped))
        vote->flags |= STOP;
    if (atomic_exchange(&elastic->check_wanted, false))
        vote->flags |= CHECK;
    if (atomic_exchange(&elastic->newcomers_wait, false))
        vote->flags |= WAITING;
    const struct td__orders *orders = td__orders_find();
    if (orders && atomic_load(&orders->leave))
        vote->flags |= LEAVE;
    TD_TRY((compares_all(elastic) ? td__elastic_hash_all : td__elastic_hash_part)(
        elastic, TD__PIECES_WEIGHTS, &vote->weights));
    return td__elastic_hash_part(elastic, TD__PIECES_OUTCOME, &vote->outcome);
}

/* ---- Other bits ------------------------------------------------------------------------------------------------- */

static uint64_t hash_of(const struct vote *vote, bool weights)
{
    return weights ? vote->weights : vote->outcome;
}

/* The hash that more than half of the ranks have; false if there is none. */
static bool find_majority(const td_elastic *elastic, const struct vote *votes, bool weights,
                          uint64_t *hash)
{
    for (int r = 0; r < elastic->size; r++) {
        int same = 0;
        *hash = hash_of(&votes[r], weights);
        for (int other = 0; other < elastic->size; other++)
            same += hash_of(&votes[other], weights) == *hash;
        if (2 * same > elastic->size)
            return true;
    }
    return false;
}

static void list_ranks(const td_elastic *elastic, const bool *which, char *text, size_t room)
{
    text[0] = 0;
    for (int r = 0; r < elastic->size; r++)
        if (which[r])
            td__text_add(text, room, "%s%d", text[0] ? ", " : "", elastic->ranks[r]);
}

static td_status fail_bits(td_elastic *elastic, const bool *odd, bool known, bool weights)
{
    char names[256];
    const char *what = weights ? "weights" : "reduced gradients";
    list_ranks(elastic, odd, names, sizeof names);
    if (!known)
        return td_fail(TD_ERR_MISMATCH,
                       "td_elastic: after step %" PRId64 " the ranks %s have different %s, and no "
                       "majority has the same; start again from a checkpoint",
                       td__elastic_committed(elastic), names, what);
    return td_fail(TD_ERR_MISMATCH,
                   "td_elastic: after step %" PRId64 " rank %s has other %s than the other ranks: "
                   "its memory or its processor is not reliable%s",
                   td__elastic_committed(elastic), names, what,
                   elastic->options.mismatch == TD_ELASTIC_EXCLUDE
                       ? "; the others go on without it"
                       : "; with the policy TD_ELASTIC_EXCLUDE the others would go on without it");
}

static td_status compare_bits(td_elastic *elastic, const struct vote *votes, bool weights)
{
    uint64_t usual;
    bool *odd = calloc((size_t)elastic->size, sizeof *odd);
    if (!odd)
        return td__fail_nomem("td_elastic");
    bool known = find_majority(elastic, votes, weights, &usual);
    int count = 0;
    for (int r = 0; r < elastic->size; r++) {
        odd[r] = !known || hash_of(&votes[r], weights) != usual;
        count += odd[r];
    }
    td_status status = TD_OK;
    if (count) {
        status = fail_bits(elastic, odd, known, weights);
        struct td__error error;
        td__error_save(&error);
        for (int r = 0; r < elastic->size; r++)
            if (odd[r])
                td__elastic_tell(elastic, (td_elastic_event){.kind = TD_ELASTIC_DIFFERS,
                                                             .rank = elastic->ranks[r],
                                                             .text = error.text});
        td__error_restore(&error);
        /* The others wait in td_group_shrink() until the one that differs has left. */
        if (known && elastic->options.mismatch == TD_ELASTIC_EXCLUDE && !odd[elastic->rank])
            status = td_fail(TD_ERR_PEER, "%s", error.text);
    }
    free(odd);
    return status;
}

/* ---- Stragglers --------------------------------------------------------------------------------------------------- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median_pace(const td_elastic *elastic, double *room)
{
    int count = 0;
    for (int r = 0; r < elastic->size; r++)
        if (elastic->active_ranks[r])
            room[count++] = elastic->paces[r].ms;
    qsort(room, (size_t)count, sizeof *room, compare_doubles);
    return room[(count - 1) / 2];
}

/* Every rank sees the same numbers, and comes to the same result. */
static td_status watch_paces(td_elastic *elastic, const struct vote *votes)
{
    double factor = elastic->options.straggler_factor;
    double *room = factor > 0 ? malloc((size_t)elastic->size * sizeof *room) : NULL;
    if (!room)
        return TD_OK; /* it is only a report */
    for (int r = 0; r < elastic->size; r++) {
        double ms = (double)votes[r].slice_ns / 1e6;
        struct td__pace *pace = &elastic->paces[r];
        pace->ms = pace->ms == 0 ? ms : 0.8 * pace->ms + 0.2 * ms;
    }
    double usual = median_pace(elastic, room);
    free(room);
    for (int r = 0; r < elastic->size; r++) {
        struct td__pace *pace = &elastic->paces[r];
        bool slow = elastic->active_ranks[r] && usual > 0 && pace->ms > factor * usual;
        pace->slow = slow ? pace->slow + 1 : 0;
        if (pace->slow < STRAGGLER_STEPS || pace->reported)
            continue;
        char text[200];
        pace->reported = true;
        snprintf(
            text, sizeof text,
            "td_elastic: rank %d takes %.1f ms for a slice, the median of all ranks is %.1f ms",
            elastic->ranks[r], pace->ms, usual);
        if (elastic->rank == 0)
            td_log(TD_LOG_WARN, "%s", text);
        td__elastic_tell(elastic, (td_elastic_event){.kind = TD_ELASTIC_STRAGGLER,
                                                     .rank = elastic->ranks[r],
                                                     .ms = pace->ms,
                                                     .text = text});
        if (elastic->options.straggler == TD_ELASTIC_EXCLUDE)
            return td_fail(r == elastic->rank ? TD_ERR_MISMATCH : TD_ERR_PEER,
                           "%s; the others go on without it", text);
    }
    return TD_OK;
}

/* ---- Together ------------------------------------------------------------------------------------------------------ */

static td_status take_votes(td_elastic *elastic, const struct vote *votes)
{
    uint32_t flags = 0;
    int leaving = 0;
    for (int r = 0; r < elastic->size; r++) {
        const struct vote *vote = &votes[r];
        if (vote->step != td__elastic_committed(elastic))
            return td_fail(TD_ERR_MISMATCH,
                           "td_elastic: rank %d is in step %" PRId64 ", this one in step %" PRId64
                           "; every rank must call td_elastic_run() alike",
                           elastic->ranks[r], vote->step, td__elastic_committed(elastic));
        flags |= vote->flags;
        leaving += (vote->flags & LEAVE) != 0;
    }
    TD_TRY(compare_bits(elastic, votes, false));
    TD_TRY(compare_bits(elastic, votes, true));
    elastic->check_due = flags & CHECK;
    elastic->admit_due = (flags & WAITING) && elastic->size < elastic->slices;
    /* Where all leave, none is left that could go on. */
    if (flags & STOP || leaving == elastic->size)
        atomic_store(&elastic->stopped, true);
    else if (votes[elastic->rank].flags & LEAVE)
        atomic_store(&elastic->leaves, true);
    return watch_paces(elastic, votes);
}

/* Those that know that a rank differs leave the group, or wait for it to leave. Votes reach the ranks of another host through
 * this one, so nobody does before all have theirs: a rank without them would take what it sees for a loss. */
static void wait_for_all_votes(td_elastic *elastic)
{
    struct td__error error;
    td__error_save(&error);
    td_status status = td_group_barrier(elastic->all, NULL);
    (void)status; /* it may fail for a rank that has left behind it */
    td__error_restore(&error);
}

td_status td__elastic_agree(td_elastic *elastic)
{
    int64_t begin = td__now_ns();
    struct vote mine, *votes = malloc((size_t)elastic->size * sizeof *votes);
    if (!votes)
        return td__fail_nomem("td_elastic");
    td_status status = fill_vote(elastic, &mine);
    int64_t waits = td__now_ns();
    if (!status)
        status = td_group_all_gather(votes, &mine, sizeof mine, TD_U8, elastic->all, NULL);
    if (!status && (status = take_votes(elastic, votes)))
        wait_for_all_votes(elastic);
    free(votes);
    pthread_mutex_lock(&elastic->lock);
    elastic->hash_total_ns += waits - begin;
    elastic->agreement_total_ns += td__now_ns() - begin;
    elastic->agreements++;
    pthread_mutex_unlock(&elastic->lock);
    return status;
}
