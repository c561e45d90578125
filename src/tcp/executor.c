/* The executor; see link_io.h.
 *
 * All transfers of a round proceed together: each is sent or received as far as its socket allows, in turns, until
 * all are done. Then follow the copies and reductions of the round, and the next round.
 *
 * Waiting costs more than sending. A round trip over loopback takes 11 us if the reader spins, and 100 us if it
 * sleeps. So a rank spins, yields and then sleeps in poll() (base/wait.h).
 *
 * A sleeper that is woken by a failure, or has slept for long, checks all links (links.h): first after CHECK_NS,
 * then after twice as long. */
#include "tcp/link_io.h"

#include "base/fail.h"
#include "base/text.h"
#include "peer/wait_event.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum {
    FEW = 4, /* sockets that are tried one by one; for more, poll() finds those that are ready */
    CHECK_NS = 100000000, /* asleep, before the first check of all links */
    LEFT_NS = 800000000,  /* the wait for data that a rank sent before it left */
    GRACE_MS = 500,       /* after a failure: to finish frames that have been sent in part */
    NAMED = 8,            /* ranks that a timeout names */
};

/* One round. The first `sends` of the ios send, the others receive. */
struct round {
    struct td__executor *executor;
    const struct td__run *run;
    struct td__link_io *ios;
    uint32_t count, sends;
    bool oversubscribed; /* more ranks on this machine than processors */
    uint32_t begun;      /* ios that have been prepared */
    uint32_t left;       /* ios that are not done */
    bool woken;          /* the links are to be checked now */
    int64_t pause;       /* between the last two checks; 0: none since a byte was transferred */
    td__deadline next;   /* the time of the next check */
    int64_t left_since;  /* when a peer was found to have left; 0: none has */
};

void td__executor_free(struct td__executor *executor)
{
    free(executor->ios);
    free(executor->polled);
    free(executor->piece);
}

static td_status reserve(struct td__executor *executor, const struct td__run *run)
{
    uint32_t count = run->compiled->most_transfers;
    if (!executor->piece) {
        executor->piece = aligned_alloc(64, TD__LINK_PIECE);
        executor->processors = td__processors();
    }
    if (count > executor->capacity) {
        free(executor->ios);
        free(executor->polled);
        executor->ios = malloc(count * sizeof *executor->ios);
        executor->polled = malloc((count + 1) * sizeof *executor->polled);
        executor->capacity = executor->ios && executor->polled ? count : 0;
    }
    if (!executor->piece || count > executor->capacity)
        return td__fail_nomem(td__operation_describe(run->call.operation));
    return TD_OK;
}

static struct td__tcp_link *link_of(const struct round *round, const struct td__link_io *io)
{
    return &round->run->call.links->at[io->transfer->peer];
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static bool sends(const struct round *round, const struct td__link_io *io)
{
    return io < round->ios + round->sends;
}

/* Sets `ready` of the ios by poll(), which sleeps until the deadline at most; 0: not at all. */
static td_status poll_ios(struct round *round, td__deadline deadline)
{
    const struct td__run *run = round->run;
    struct pollfd *polled = round->executor->polled;
    uint32_t count = 0;
    for (struct td__link_io *io = round->ios; io < round->ios + round->count; io++) {
        const struct td__tcp_link *link = link_of(round, io);
        if (td__link_io_done(io))
            continue;
        short events = sends(round, io) ? POLLOUT : POLLIN;
        if (sends(round, io) && !link->expected)
            events |= POLLIN;
        polled[count++] = (struct pollfd){.fd = link->fd, .events = events};
    }
    int ready = deadline ? td__links_sleep(run->call.links, polled, count, deadline, &round->woken)
                         : poll(polled, count, 0);
    if (ready < 0 && errno != EINTR)
        return td_fail(TD_ERR_SYSTEM, "%s: poll: %s", td__operation_describe(run->call.operation),
                       td__errno_text(errno));
    if (ready <= 0)
        return TD_OK;
    struct pollfd *at = polled;
    for (struct td__link_io *io = round->ios; io < round->ios + round->count; io++) {
        if (td__link_io_done(io))
            continue;
        io->ready = (at->revents & ~(sends(round, io) ? POLLIN : 0)) != 0;
        /* If no frame is expected, this is a failure notice, or a frame of another call. */
        if (sends(round, io) && !link_of(round, io)->expected && at->revents & POLLIN)
            TD_TRY(td__links_check_peer(&run->call, io->transfer->peer));
        at++;
    }
    return TD_OK;
}

static void try_all(struct round *round)
{
    for (uint32_t i = 0; i < round->count; i++)
        round->ios[i].ready = !td__link_io_done(&round->ios[i]);
}

static td_status fail_timeout(const struct round *round)
{
    struct td__links *links = round->run->call.links;
    char ranks[NAMED * 96] = "";
    int found = 0;
    for (const struct td__link_io *io = round->ios; io < round->ios + round->count; io++) {
        if (td__link_io_done(io) || (sends(round, io) && link_of(round, io)->expected))
            continue;
        if (++found <= NAMED)
            td__text_add(ranks, sizeof ranks, "%s%.90s", found > 1 ? ", " : "",
                         links->source->describe(links->arg, io->transfer->peer));
    }
    if (found > NAMED)
        td__text_add(ranks, sizeof ranks, " and %d more", found - NAMED);
    return td__links_fail_timeout(links, round->run->call.operation, ranks);
}

/* Whether a peer has left, and the data that it sent before must have arrived by now. */
static bool has_left(struct round *round, int peer, int64_t now)
{
    if (!td__links_exit_reason(round->run->call.links, peer, false))
        return false;
    if (!round->left_since)
        round->left_since = now;
    round->next = td__deadline_earlier(round->next, round->left_since + LEFT_NS);
    return now >= round->left_since + LEFT_NS;
}

/* After a long wait, or when woken; see links.h. */
static td_status check_links(struct round *round, int64_t now)
{
    const struct td__link_call *call = &round->run->call;
    bool early = now < round->next;
    round->woken = false;
    if (!early) {
        round->pause = round->pause * 2 < TD__LONGEST_SLEEP_NS ? round->pause * 2
                                                               : TD__LONGEST_SLEEP_NS;
        round->next = now + round->pause;
        td__links_watch(call->links);
    }
    for (struct td__link_io *io = round->ios; io < round->ios + round->count; io++) {
        int peer = io->transfer->peer;
        if (td__link_io_done(io))
            continue;
        if (has_left(round, peer, now))
            return td__links_fail_end(call, peer, 0);
        if (early)
            continue;
        td__links_exit_reason(call->links, peer, true);
        if (!sends(round, io) && io->done == 0)
            td__links_notify(call, peer, false);
    }
    return td__links_check_all(call, &round->next);
}

static td_status wait_step(struct round *round)
{
    td__deadline deadline = round->run->call.operation->deadline;
    if (td__backoff(&round->executor->backoff, round->oversubscribed)) {
        if (round->left > FEW)
            return poll_ios(round, 0);
        try_all(round);
        return TD_OK;
    }
    int64_t now = td__now_ns();
    if (now >= deadline)
        return fail_timeout(round);
    if (!round->pause) {
        round->pause = CHECK_NS;
        round->next = now + CHECK_NS;
    }
    if (round->woken || now >= round->next)
        TD_TRY(check_links(round, now));
    return poll_ios(round, td__deadline_earlier(deadline, round->next));
}

/* ---- Rounds ---------------------------------------------------------------------------------- */

static td_status move_ios(struct round *round, bool *moved)
{
    const struct td__run *run = round->run;
    for (struct td__link_io *io = round->ios; io < round->ios + round->count; io++) {
        if (!io->ready)
            continue;
        TD_TRY(sends(round, io) ? td__link_io_send(io, run, moved)
                                : td__link_io_receive(io, run, moved));
        if (!td__link_io_done(io))
            continue;
        io->ready = false;
        round->left--;
        if (!sends(round, io))
            link_of(round, io)->expected = false;
    }
    return TD_OK;
}

/* Opens the links of a round: first those to which this rank connects, so that no two ranks wait for each other. */
static td_status open_links(const struct round *round, const struct td__transfer *transfers)
{
    const struct td__links *links = round->run->call.links;
    for (int accepts = 0; accepts < 2; accepts++)
        for (uint32_t i = 0; i < round->count; i++) {
            int peer = transfers[i].peer;
            if (links->at[peer].fd < 0 && (peer > links->index) == accepts)
                TD_TRY(td__links_open(&round->run->call, peer));
        }
    return TD_OK;
}

static td_status exchange(struct round *round, const struct td__transfer *transfers)
{
    TD_TRY(open_links(round, transfers));
    round->executor->backoff.begun = 0;
    for (uint32_t i = 0; i < round->count; i++) {
        td__link_io_begin(&round->ios[i], round->run, &transfers[i]);
        if (i >= round->sends)
            link_of(round, &round->ios[i])->expected = true;
        round->begun++;
    }
    while (round->left) {
        bool moved = false;
        TD_TRY(move_ios(round, &moved));
        if (moved) {
            round->executor->backoff.begun = 0;
            round->pause = round->left_since = 0;
        } else {
            TD_TRY(wait_step(round));
        }
    }
    return TD_OK;
}

/* After a failure: finishes frames that have been sent in part, so that a failure notice can follow them. */
static void finish_sends(struct round *round)
{
    td__deadline deadline = td__deadline_in_ms(GRACE_MS);
    for (uint32_t i = 0; i < round->begun && i < round->sends; i++) {
        struct td__link_io *io = &round->ios[i];
        struct td__tcp_link *link = link_of(round, io);
        while (link->sending && !td__deadline_passed(deadline)) {
            bool moved = false;
            struct pollfd out = {.fd = link->fd, .events = POLLOUT};
            if (td__link_io_send(io, round->run, &moved))
                break;
            if (!moved)
                poll(&out, 1, td__deadline_poll_ms(deadline));
        }
    }
}

static void run_local(const struct td__run *run, const struct td__step *step)
{
    const struct td__blocks *to = &run->buffers[step->buffer], *from = &run->buffers[step->from];
    char *target = td__block_at(to, step->block), *source = td__block_at(from, step->from_block);
    size_t bytes = td__block_bytes(step->buffer == TD__SCRATCH ? from : to,
                                   step->buffer == TD__SCRATCH ? step->from_block : step->block,
                                   step->count);
    if (step->kind == TD__STEP_REDUCE)
        td__reduce_combine(&run->call.operation->reduction, target, source, bytes / to->element);
    else if (bytes && target != source)
        memcpy(target, source, bytes);
}

/* Notifies the members to which there is a link, and those with which this rank exchanges data in a later round. The
 * first member that fails notifies all members. */
static void fail_run(struct round *round, uint32_t rounds_done, td_status status)
{
    const struct td__compiled_schedule *compiled = round->run->compiled;
    struct td__links *links = round->run->call.links;
    struct td__error error;
    td__error_save(&error);
    finish_sends(round);
    td__links_send_failure(links, round->run->call.operation, status, error.text);
    td__deadline deadline = td__deadline_in_ms(GRACE_MS);
    for (uint32_t i = rounds_done; i < compiled->round_count; i++)
        for (uint32_t m = compiled->rounds[i].first_send; m < compiled->rounds[i].end; m++)
            td__links_send_failure_to(links, compiled->transfers[m].peer, deadline);
    if (!links->failure_received)
        td__links_send_failure_to_all(links, deadline);
    td__error_restore(&error);
}

td_status td__executor_run(struct td__executor *executor, struct td__run *run)
{
    const struct td__compiled_schedule *compiled = run->compiled;
    struct round round = {.executor = executor, .run = run};
    td_status status = reserve(executor, run);
    run->piece = executor->piece;
    uint32_t done = 0;
    for (; !status && done < compiled->round_count; done += !status) {
        const struct td__compiled_round *at = &compiled->rounds[done];
        round.ios = executor->ios;
        round.count = round.left = at->end - at->first_send;
        round.sends = at->first_recv - at->first_send;
        round.begun = 0;
        round.oversubscribed = run->call.links->neighbours >= executor->processors;
        status = exchange(&round, &compiled->transfers[at->first_send]);
        for (uint32_t i = at->first_local; !status && i < at->end_local; i++)
            if (compiled->schedule.steps[i].kind >= TD__STEP_COPY)
                run_local(run, &compiled->schedule.steps[i]);
    }
    if (status)
        fail_run(&round, done, status);
    return status;
}
