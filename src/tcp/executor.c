/* The executor; see executor.h.
 *
 * All messages of a round move together: each is sent or received as far as its socket goes, in
 * turns, until all are done. Then come the round's copies and reductions, and the next round.
 *
 * Waiting costs more than sending. A round trip over loopback takes 11 us where the reader tries again
 * and again, and 100 us where it sleeps. So a rank tries for a while, then gives the processor away
 * between tries (base/spin.h), and then sleeps in poll(). Where there are more ranks than processors
 * it gives it away from the beginning, since the one it waits for needs it.
 *
 * From time to time a sleeper looks around (links.h). */
#include "tcp/executor.h"

#include "base/fail.h"
#include "peer/wait_event.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum {
    TRY_NS = 20000,  /* without giving the processor away */
    SPIN_NS = 60000, /* before sleeping */
    FEW = 4,         /* sockets that are tried one by one; of more, poll() says which are ready */
    LOOK_NS = 100000000, /* asleep, between two looks around */
    PATIENT_LOOKS = 8,   /* at one that has left, without anything coming from it */
    GRACE_MS = 500,      /* to finish messages that have been sent in part, after a failure */
    NAMED = 8,           /* ranks that a timeout names */
    REACHED = 64,        /* size of a comm up to which a failure is told to all */
};

/* One round under way. Flows before `sends` send, the others receive. */
struct round {
    struct td__executor *executor;
    const struct td__run *run;
    struct td__link_io *ios;
    uint32_t count, sends;
    bool oversubscribed;  /* more ranks on this machine than processors */
    uint32_t begun;       /* flows that have been prepared */
    uint32_t left;        /* not done */
    int64_t spin_end;     /* 0: nothing to wait for yet */
    int64_t asleep_since; /* the last look around; 0: not asleep */
    int looks;            /* around, since something moved */
};

void td__executor_free(struct td__executor *executor)
{
    free(executor->ios);
    free(executor->polled);
    free(executor->piece);
}

static td_status make_room(struct td__executor *executor, const struct td__run *run)
{
    uint32_t count = run->compiled->most_messages;
    if (!executor->piece) {
        executor->piece = aligned_alloc(64, TD__FLOW_PIECE);
        executor->processors = td__processors();
    }
    if (count > executor->capacity) {
        free(executor->ios);
        free(executor->polled);
        executor->ios = malloc(count * sizeof *executor->ios);
        executor->polled = malloc(count * sizeof *executor->polled);
        executor->capacity = executor->ios && executor->polled ? count : 0;
    }
    if (!executor->piece || count > executor->capacity)
        return td__fail_nomem(td__operation_describe(run->operation));
    return TD_OK;
}

static struct td__tcp_link *link_of(const struct round *round, const struct td__link_io *io)
{
    return &round->run->links->at[io->message->peer];
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static bool sends(const struct round *round, const struct td__link_io *io)
{
    return io < round->ios + round->sends;
}

/* Asks poll() which flows can move, for at most `timeout_ms`. */
static td_status poll_ios(struct round *round, int timeout_ms)
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
    int ready = poll(polled, count, timeout_ms);
    if (ready < 0 && errno != EINTR)
        return td_fail(TD_ERR_SYSTEM, "%s: poll: %s", td__operation_describe(run->operation),
                       td__errno_text(errno));
    if (ready <= 0)
        return TD_OK;
    struct pollfd *at = polled;
    for (struct td__link_io *io = round->ios; io < round->ios + round->count; io++) {
        if (td__link_io_done(io))
            continue;
        io->ready = (at->revents & ~(sends(round, io) ? POLLIN : 0)) != 0;
        /* Where nothing is due comes a goodbye, or the message of one that made another call. */
        if (sends(round, io) && !link_of(round, io)->expected && at->revents & POLLIN)
            TD_TRY(td__links_look_at(run->links, io->message->peer, run->operation, &run->header));
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
    struct td__links *links = round->run->links;
    char ranks[NAMED * 96] = "";
    size_t used = 0;
    int named = 0, others = 0;
    for (const struct td__link_io *io = round->ios; io < round->ios + round->count; io++) {
        if (td__link_io_done(io) || (sends(round, io) && link_of(round, io)->expected))
            continue;
        if (named == NAMED) {
            others++;
            continue;
        }
        int length = snprintf(ranks + used, sizeof ranks - used, "%s%.90s", named ? ", " : "",
                              links->source->describe(links->arg, io->message->peer));
        used += (size_t)length;
        named++;
    }
    if (others)
        snprintf(ranks + used, sizeof ranks - used, " and %d more", others);
    return td__links_fail_timeout(links, round->run->operation, ranks);
}

/* After a long wait; see links.h. */
static td_status look_around(struct round *round)
{
    const struct td__run *run = round->run;
    for (struct td__link_io *io = round->ios; io < round->ios + round->count; io++) {
        if (td__link_io_done(io))
            continue;
        /* One that has left has sent all that it will; it may still be on its way. */
        if (td__links_exit_reason(run->links, io->message->peer) && round->looks > PATIENT_LOOKS)
            return td__links_fail_end(run->links, io->message->peer, run->operation, &run->header,
                                      0);
        if (!sends(round, io) && io->done == 0)
            td__links_tell(run->links, io->message->peer, &run->header, false);
    }
    return td__links_look_around(run->links, run->operation, &run->header);
}

static td_status wait_a_while(struct round *round)
{
    td__deadline deadline = round->run->operation->deadline;
    int64_t now = td__now_ns();
    if (!round->spin_end)
        round->spin_end = now + SPIN_NS;
    bool tries = !round->oversubscribed && now < round->spin_end - SPIN_NS + TRY_NS;
    if (tries || td__spin_until(&round->executor->spin, round->spin_end)) {
        if (round->left > FEW)
            return poll_ios(round, 0);
        try_all(round);
        return TD_OK;
    }
    now = td__now_ns();
    if (now >= deadline)
        return fail_timeout(round);
    int64_t look_at = round->asleep_since + LOOK_NS;
    if (!round->asleep_since) {
        round->asleep_since = now;
        look_at = now + LOOK_NS;
    } else if (now >= look_at) {
        round->asleep_since = now;
        look_at = now + LOOK_NS;
        round->looks++;
        TD_TRY(look_around(round));
    }
    return poll_ios(round, td__deadline_poll_ms(td__deadline_earlier(deadline, look_at)));
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

/* Opens the links of a round: first those that this rank has to open, so that nobody waits for one
 * who waits. */
static td_status open_links(const struct round *round, const struct td__message *messages)
{
    struct td__links *links = round->run->links;
    for (int accepts = 0; accepts < 2; accepts++)
        for (uint32_t i = 0; i < round->count; i++) {
            int peer = messages[i].peer;
            if (links->at[peer].fd < 0 && (peer > links->index) == accepts)
                TD_TRY(td__links_open(links, peer, round->run->operation, &round->run->header));
        }
    return TD_OK;
}

static td_status exchange(struct round *round, const struct td__message *messages)
{
    TD_TRY(open_links(round, messages));
    for (uint32_t i = 0; i < round->count; i++) {
        td__link_io_begin(&round->ios[i], round->run, &messages[i]);
        if (i >= round->sends)
            link_of(round, &round->ios[i])->expected = true;
        round->begun++;
    }
    while (round->left) {
        bool moved = false;
        TD_TRY(move_ios(round, &moved));
        if (moved) {
            round->spin_end = 0;
            round->asleep_since = round->looks = 0;
        } else {
            TD_TRY(wait_a_while(round));
        }
    }
    return TD_OK;
}

/* After a failure: goes on with messages that have been sent in part, so that what the receiver finds
 * behind them is a goodbye with the reason. */
static void finish_sends(struct round *round)
{
    td__deadline deadline = td__deadline_in_ms(GRACE_MS);
    for (uint32_t i = 0; i < round->begun && i < round->sends; i++) {
        struct td__link_io *io = &round->ios[i];
        struct td__tcp_link *link = link_of(round, io);
        while (link->sending && !td__deadline_passed(deadline)) {
            bool moved = false;
            struct pollfd room = {.fd = link->fd, .events = POLLOUT};
            if (td__link_io_send(io, round->run, &moved))
                break;
            if (!moved)
                poll(&room, 1, td__deadline_poll_ms(deadline));
        }
    }
}

static void run_local(const struct td__run *run, const struct td__step *step)
{
    const struct td__blocks *to = &run->places[step->place], *from = &run->places[step->from];
    char *target = td__block_at(to, step->block), *source = td__block_at(from, step->from_block);
    size_t bytes = td__block_bytes(step->place == TD__SCRATCH ? from : to,
                                   step->place == TD__SCRATCH ? step->from_block : step->block,
                                   step->count);
    if (step->kind == TD__STEP_REDUCE)
        td__reduce_combine(&run->operation->reduction, target, source, bytes / to->element);
    else if (bytes && target != source)
        memcpy(target, source, bytes);
}

/* Lets the others know: those on links, and those whom this rank was to meet in a later round. The
 * first one to fail tells everybody, where that is not too many. */
static void fail_run(struct round *round, uint32_t rounds_done, td_status status)
{
    const struct td__run *run = round->run;
    const struct td__compiled_schedule *compiled = run->compiled;
    char reason[TD__GOODBYE_TEXT];
    strncpy(reason, td_last_error(), sizeof reason - 1);
    reason[sizeof reason - 1] = '\0';
    finish_sends(round);
    td__links_say_goodbye(run->links, run->operation, status, reason);
    td__deadline deadline = td__deadline_in_ms(GRACE_MS);
    for (uint32_t i = rounds_done; i < compiled->round_count; i++)
        for (uint32_t m = compiled->rounds[i].first_send; m < compiled->rounds[i].end; m++)
            td__links_reach(run->links, compiled->messages[m].peer, deadline);
    for (int i = 0; i < run->links->size && run->links->size <= REACHED && !run->links->heard; i++)
        td__links_reach(run->links, i, deadline);
    td_fail(status, "%s", reason);
}

td_status td__executor_run(struct td__executor *executor, struct td__run *run)
{
    const struct td__compiled_schedule *compiled = run->compiled;
    struct round round = {.executor = executor, .run = run};
    td_status status = make_room(executor, run);
    run->piece = executor->piece;
    uint32_t done = 0;
    for (; !status && done < compiled->round_count; done += !status) {
        const struct td__compiled_round *at = &compiled->rounds[done];
        round.ios = executor->ios;
        round.count = round.left = at->end - at->first_send;
        round.sends = at->first_recv - at->first_send;
        round.begun = 0;
        round.oversubscribed = run->links->neighbours >= executor->processors;
        status = exchange(&round, &compiled->messages[at->first_send]);
        for (uint32_t i = at->first_local; !status && i < at->end_local; i++)
            if (compiled->schedule.steps[i].kind >= TD__STEP_COPY)
                run_local(run, &compiled->schedule.steps[i]);
    }
    if (status)
        fail_run(&round, done, status);
    return status;
}
