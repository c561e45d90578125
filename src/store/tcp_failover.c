/* A client of a store with several servers; see tcp_replica.h.
 *
 * While the server has standbys, the client keeps the frame of each change until an answer confirms it. When the connection
 * ends, one of the threads that wait looks for the primary: it asks one server after another, lowest number first and the
 * lost one last, and again, until one is the primary. HELLO says who the client is and from which number on it sends
 * its changes again; what does not change the store is sent again from the list of calls, after them.
 *
 *     lost  ──> moving: HELLO, STATE  ──> sending: kept changes, calls that read  ──> as before
 *       ^                 │ nobody is (yet)
 *       └─────────────────┘
 *
 * A server is taken only when it is the primary of a term that is not earlier than the client's, and when the copy that it began
 * with is not older than the list of members that the client knows. */
#include "base/fail.h"
#include "base/text.h"
#include "os/socket.h"
#include "os/tls.h"
#include "os/trust.h"
#include "store/tcp_client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    FIRST_ATTEMPT_MS = 200, /* to connect to one server; doubled in each round … */
    LONGEST_ATTEMPT_MS = 3000,
    ANSWER_MS = 3000, /* for the STATE of a server that was reached */
    PAUSE_MS = 20,    /* between two rounds; doubled, too */
    LONGEST_PAUSE_MS = 500,
    PATIENCE = 6, /* how many heartbeats' limits until a standby must have been promoted */
    RESEND_MS = 5000,
    STATE_MOST = 64 << 10,
};

/* ---- Changes that are kept ------------------------------------------------------------------- */

struct td__tcp_kept *td__tcp_keep(struct td__tcp_client *client, struct td__buffer *frame,
                                  uint64_t sequence)
{
    struct td__tcp_kept *kept = calloc(1, sizeof *kept);
    if (!kept)
        return NULL;
    kept->frame = *frame;
    kept->number = client->changes;
    kept->sequence = sequence;
    *frame = (struct td__buffer){0};
    client->kept_bytes += kept->frame.size;
    client->kept_answers += !td__wire_is_silent(kept->frame.data[8]);
    STAILQ_INSERT_TAIL(&client->kept, kept, link);
    return kept;
}

static void drop_first(struct td__tcp_client *client)
{
    struct td__tcp_kept *kept = STAILQ_FIRST(&client->kept);
    STAILQ_REMOVE_HEAD(&client->kept, link);
    client->kept_bytes -= kept->frame.size;
    client->kept_answers -= !td__wire_is_silent(kept->frame.data[8]);
    td__buffer_free(&kept->frame);
    free(kept);
}

void td__tcp_confirm(struct td__tcp_client *client, uint64_t sequence)
{
    struct td__tcp_kept *first;
    while ((first = STAILQ_FIRST(&client->kept)) && first->sequence <= sequence) {
        if (first == client->going_out) { /* the answer is here before send() has returned */
            client->going_out_confirmed = true;
            return;
        }
        drop_first(client);
    }
}

void td__tcp_drop_kept(struct td__tcp_client *client)
{
    while (!STAILQ_EMPTY(&client->kept))
        drop_first(client);
}

/* ---- What a server says of itself ------------------------------------------------------------ */

void td__tcp_put_hello(struct td__buffer *frame, const struct td__tcp_client *client, uint64_t id,
                       uint64_t first, bool wants_state)
{
    size_t start = td__wire_begin(frame, 0, TD__WIRE_HELLO);
    td__buffer_put_u64(frame, id);
    td__buffer_put_u64(frame, first);
    td__buffer_put_u64(frame, client->seen_term);
    td__buffer_put_u8(frame, wants_state);
    td__wire_end(frame, start);
}

/* The members as this client reaches them: one that does not know its own address is where the client has found it. */
static void fill_in_address(struct td__replica_report *report, const char *where)
{
    for (int i = 0; i < report->members.count; i++) {
        struct td__replica_member *member = &report->members.at[i];
        if (member->number == report->number && !*member->address)
            snprintf(member->address, sizeof member->address, "%s", where);
    }
}

/* Adds those that are not there yet: where else the primary may be. */
static void add_members(struct td__replica_list *list, const struct td__replica_list *more)
{
    for (int i = 0; i < more->count; i++) {
        const char *address = more->at[i].address;
        bool new = *address && list->count < TD__REPLICA_MOST;
        for (int k = 0; k < list->count; k++)
            new = new &&strcmp(list->at[k].address, address) != 0;
        if (new)
            list->at[list->count++] = more->at[i];
    }
}

void td__tcp_take_state(struct td__tcp_client *client, const uint8_t *body, size_t size)
{
    struct td__replica_report report;
    if (!td__replica_read_state(body, size, &report)) {
        td__tcp_client_lose(client, "the server sent something that is no answer");
        return;
    }
    fill_in_address(&report, client->where);
    if (report.term > client->seen_term)
        client->seen_term = report.term;
    if (report.role == TD__REPLICA_ENDED) {
        td__tcp_client_break(client, "the store was closed");
        return;
    }
    if (report.role == TD__REPLICA_PRIMARY && report.term == client->seen_term) {
        if (td__replica_not_older(report.term, report.version, client->at.term, client->at.version))
            client->at = report;
        client->replicated = client->at.members.count > 1;
        return;
    }
    add_members(&client->at.members, &report.members);
    client->replicated = client->at.members.count > 0;
    td__tcp_client_lose(client, report.role == TD__REPLICA_DEPOSED ? "it was deposed"
                                                                   : "it is not the primary");
}

/* ---- Looking for the primary ----------------------------------------------------------------- */

enum finding { FOUND, NOT_PRIMARY, SILENT, DEAD, CLOSED };

struct search {
    struct td__tcp_client *client; /* its id and secret only */
    struct td__replica_report at;
    uint64_t seen_term;
    char where[TD__REPLICA_ADDRESS];
    uint64_t first;
    int64_t attempt_ms;
    char tried[1024];

    int fd; /* of the primary, and what it has said */
    char found[TD__REPLICA_ADDRESS];
    struct td__replica_report report;
};

static bool acceptable(const struct search *search, const struct td__replica_report *report)
{
    const struct td__replica_report *at = &search->at;
    if (report->term < search->seen_term)
        return false;
    if (report->term > at->term)
        return td__replica_not_older(report->base_term, report->base_version, at->term,
                                     at->version) ||
               !at->term;
    return report->term == at->term && report->version >= at->version;
}

static void note(struct search *search, const char *address, const char *outcome)
{
    td__text_add(search->tried, sizeof search->tried, "%s %s (%s)", *search->tried ? "," : "",
                 address, outcome);
}

/* HELLO and STATE on a new connection. 0, or an errno. */
static int exchange(struct search *search, int fd, struct td__replica_report *report,
                    td__deadline deadline)
{
    struct td__buffer frame = {0};
    struct td__tcp_client seen = {.seen_term = search->seen_term};
    struct td__wire_header header;
    uint8_t bytes[TD__WIRE_HEADER];
    td__tcp_put_hello(&frame, &seen, search->client->id, search->first, true);
    int error = frame.failed ? ENOMEM : td__send_all(fd, frame.data, frame.size, deadline);
    td__buffer_free(&frame);
    if (!error)
        error = td__recv_all(fd, bytes, sizeof bytes, deadline);
    if (error)
        return error;
    if (!td__wire_read_header(bytes, &header) || header.code != TD__REPLICA_STATE ||
        header.body_size > STATE_MOST)
        return EPROTO;
    uint8_t *body = malloc(header.body_size + 1);
    error = body ? td__recv_all(fd, body, header.body_size, deadline) : ENOMEM;
    if (!error && !td__replica_read_state(body, header.body_size, report))
        error = EPROTO;
    free(body);
    return error;
}

static enum finding ask(struct search *search, const char *address, td__deadline deadline)
{
    static const uint8_t only_one[TD__IDENTITY_SIZE] = {0}; /* where nothing listens, it says so */
    char host[TD__REPLICA_ADDRESS];
    int port, fd;
    struct td__replica_report report;
    if (!td__replica_split_address(address, host, &port))
        return DEAD;
    td__deadline soon = td__deadline_earlier(deadline, td__deadline_in_ms(search->attempt_ms));
    td_status status = td__connect_trusted(host, port, "store", only_one, &search->client->secret,
                                           soon, &fd);
    if (status) {
        note(search, address, status == TD_ERR_PEER ? "nothing listens there" : td__error_text());
        return status == TD_ERR_PEER || status == TD_ERR_AUTH ? DEAD : SILENT;
    }
    int error = exchange(search, fd, &report,
                         td__deadline_earlier(deadline, td__deadline_in_ms(ANSWER_MS)));
    if (!error && report.role == TD__REPLICA_PRIMARY && acceptable(search, &report)) {
        search->fd = fd;
        search->report = report;
        snprintf(search->found, sizeof search->found, "%s", address);
        fill_in_address(&search->report, address);
        return FOUND;
    }
    td__sock_close(fd);
    if (error) {
        note(search, address,
             error == ENODATA ? "it has closed the connection" : td__errno_text(error));
        return SILENT;
    }
    note(search, address,
         report.role == TD__REPLICA_PRIMARY
             ? "it is the primary of an earlier term, or of an older copy"
         : report.role == TD__REPLICA_STANDBY ? "a standby, which was not promoted"
         : report.role == TD__REPLICA_DEPOSED ? "it was deposed"
                                              : "the store was closed");
    if (report.term > search->seen_term)
        search->seen_term = report.term;
    add_members(&search->at.members, &report.members); /* for the next round */
    return report.role == TD__REPLICA_ENDED ? CLOSED : NOT_PRIMARY;
}

/* One round: by number, the server that was lost at the end. */
static enum finding ask_all(struct search *search, td__deadline deadline)
{
    struct td__replica_list list = search->at.members;
    enum finding best = DEAD;
    search->tried[0] = '\0';
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < list.count; i++) {
            const char *address = list.at[i].address;
            bool was_lost = !strcmp(address, search->where);
            if (!*address || was_lost != (round == 1) || td__deadline_passed(deadline))
                continue;
            enum finding finding = ask(search, address, deadline);
            if (finding == FOUND || finding == CLOSED)
                return finding;
            best = finding < best ? finding : best;
        }
    return best;
}

/* ---- Going on there -------------------------------------------------------------------------- */

/* Whether every change of this client is accounted for; else its loss is reported. */
static bool account(struct td__tcp_client *client, const struct td__replica_report *report)
{
    if (report->gone)
        td__tcp_client_break(client, "the store took this process for dead, and has carried out "
                                     "its will; it was away for too long");
    else if (!report->known && !STAILQ_EMPTY(&client->kept))
        td__tcp_client_break(client, "this process was away for so long that the store has "
                                     "forgotten which of its requests were carried out");
    else if (client->silent_not_kept > report->done)
        td__tcp_client_break(client, "another server has taken over, without all that was sent to "
                                     "this one");
    return !client->broken.status;
}

static void fail_call(struct td__tcp_call *call)
{
    static const char text[] = "tcp store: the server was lost, and another one has taken over; "
                               "whether this request was carried out cannot be told";
    LIST_REMOVE(call, link);
    td__buffer_put_string(&call->body, text, strlen(text));
    call->status = TD_ERR_PEER;
    call->done = true;
}

/* Changes that were sent before this client knew of standbys, and so were not kept. One that the new primary does not have is
 * sent as a new one. */
static void look_at_unkept_calls(struct td__tcp_client *client,
                                 const struct td__replica_report *report)
{
    struct td__tcp_call *call, *next;
    for (call = LIST_FIRST(&client->calls); call; call = next) {
        next = LIST_NEXT(call, link);
        if (!call->sequence || call->kept || !call->number)
            continue;
        uint64_t number = call->number;
        if (report->known && number > report->done) {
            call->number = ++client->changes;
            call->sequence = ++client->sent;
            call->kept = td__tcp_keep(client, call->frame, call->sequence);
        }
        if (!call->kept)
            fail_call(call);
    }
}

static void put_requests(struct td__tcp_client *client, struct td__buffer *out)
{
    struct td__tcp_kept *kept;
    struct td__tcp_call *call;
    STAILQ_FOREACH(kept, &client->kept, link)
    td__buffer_put(out, kept->frame.data, kept->frame.size);
    LIST_FOREACH (call, &client->calls, link) {
        if (call->sequence && !call->number)
            td__buffer_put(out, call->frame->data, call->frame->size);
    }
}

static void go_on_there(struct td__tcp_client *client, struct search *search, td__deadline deadline)
{
    if (client->fd >= 0) {
        td_log(TD_LOG_INFO, "tcp store: the server at %s is lost (%s); going on at %s",
               client->where, client->lost_text, search->found);
        td__sock_close(client->fd);
    }
    client->fd = search->fd;
    client->in.size = 0;
    client->lost = false;
    client->at = search->report;
    client->seen_term = client->at.term;
    client->replicated = client->at.members.count > 1;
    snprintf(client->where, sizeof client->where, "%s", search->found);
    if (!account(client, &search->report))
        return;
    look_at_unkept_calls(client, &search->report);
    struct td__buffer out = {0};
    put_requests(client, &out);
    if (out.failed)
        td__tcp_client_break(client, "memory is too short to send again what was not confirmed");
    if (out.failed || !out.size)
        return;
    td__deadline resend = td__deadline_in_ms(RESEND_MS);
    client->sending = true;
    pthread_mutex_unlock(&client->lock);
    int error = td__tcp_client_send(client, out.data, out.size,
                                    deadline > resend ? deadline : resend);
    td__buffer_free(&out);
    pthread_mutex_lock(&client->lock);
    client->sending = false;
    if (error)
        td__tcp_client_lose(client, td__errno_text(error));
}

static void give_up(struct td__tcp_client *client, const struct search *search, bool closed)
{
    char reason[1400];
    if (closed)
        snprintf(reason, sizeof reason, "the store was closed");
    else
        snprintf(reason, sizeof reason, "%s; no other server of the store has taken over: tried%s",
                 client->lost_text, search->tried);
    td__tcp_client_break(client, reason);
}

/* After a round without a primary: gives up, or pauses. Holds the lock, except while it pauses. */
static void end_round(struct td__tcp_client *client, const struct search *search,
                      enum finding finding, td__deadline deadline)
{
    int64_t waited = td__now_ns() - client->lost_at;
    int64_t patience = PATIENCE * td__heartbeat_ms() * 1000000;
    bool opening = client->fd < 0;
    client->at.members = search->at.members;
    client->seen_term = search->seen_term;
    snprintf(client->tried, sizeof client->tried, "%s", search->tried);
    client->rounds++;
    if (finding == CLOSED ||
        (!opening && ((finding == DEAD && client->rounds > 1) || waited > patience))) {
        give_up(client, search, finding == CLOSED);
        return;
    }
    int64_t pause = PAUSE_MS;
    for (int i = 1; i < client->rounds && pause < LONGEST_PAUSE_MS; i++)
        pause *= 2;
    td__cond_wait(&client->answered, &client->lock,
                  td__deadline_earlier(deadline, td__deadline_in_ms(pause)));
}

bool td__tcp_fail_over(struct td__tcp_client *client, td__deadline deadline)
{
    if (client->moving || client->sending || client->reading)
        return td__cond_wait(&client->answered, &client->lock, deadline);
    if (td__deadline_passed(deadline))
        return false;
    if (!client->attempt_ms) {
        client->attempt_ms = FIRST_ATTEMPT_MS;
        client->rounds = 0;
    }
    struct search *search = calloc(1, sizeof *search);
    if (!search) {
        td__tcp_client_break(client, "memory is too short to look for another server");
        return true;
    }
    search->client = client;
    search->at = client->at;
    search->seen_term = client->seen_term;
    memcpy(search->where, client->where, sizeof search->where);
    search->first = STAILQ_EMPTY(&client->kept) ? client->changes + 1
                                                : STAILQ_FIRST(&client->kept)->number;
    search->attempt_ms = client->attempt_ms;
    client->moving = true;
    struct td__error error;
    td__error_save(&error);
    pthread_mutex_unlock(&client->lock);
    enum finding finding = ask_all(search, deadline);
    pthread_mutex_lock(&client->lock);
    td__error_undo(&error);
    client->moving = false;
    client->attempt_ms = 2 * client->attempt_ms < LONGEST_ATTEMPT_MS ? 2 * client->attempt_ms
                                                                     : LONGEST_ATTEMPT_MS;
    if (finding == FOUND)
        go_on_there(client, search, deadline);
    pthread_cond_broadcast(&client->answered);
    pthread_cond_broadcast(&client->sendable);
    if (finding != FOUND)
        end_round(client, search, finding, deadline);
    free(search);
    return true;
}
