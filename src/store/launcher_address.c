/* The address of rank 0, and the secret of the job, for ranks on several hosts that an MPI launcher has started without
 * MASTER_ADDR.
 *
 * Rank 0 opens the store at a free port, and puts the port, its addresses, and a secret that it has just made, into
 * the launcher's key-value space (launcher_kv.h). The others take the first of these addresses at which something
 * listens, those in networks of their own first. Both keep what they have learnt: another rendezvous of the process is
 * at the same place. docs/security.md says who can read the secret. */
#include "base/auth.h"
#include "base/fail.h"
#include "base/number.h"
#include "os/address.h"
#include "os/socket.h"
#include "store/launcher_kv.h"
#include "store/rendezvous_schemes.h"
#include "store/store_ops.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PROBE_MS = 1000 };

static const char key[] = "tandem-rank0";

/* Of this process: what the first rendezvous has found. A process makes one at a time. */
static struct {
    bool known;
    char host[TD__KV_HOST];
    int port;
} settled;

bool td__launcher_host(char text[TD__KV_HOST])
{
    if (settled.known)
        snprintf(text, TD__KV_HOST, "%s", settled.host);
    return settled.known;
}

bool td__launcher_kv_exists(void)
{
    return td__pmix_exists() || td__pmi_exists();
}

td_status td__launcher_kv_put(const char *name, const char *value, td__deadline deadline)
{
    char copy[TD__KV_VALUE];
    snprintf(copy, sizeof copy, "%s", value);
    return td__pmix_exists() ? td__pmix_exchange(name, copy, true, deadline)
                             : td__pmi_exchange(name, copy, true, deadline);
}

td_status td__launcher_kv_get(const char *name, char value[TD__KV_VALUE], td__deadline deadline)
{
    return td__pmix_exists() ? td__pmix_exchange(name, value, false, deadline)
                             : td__pmi_exchange(name, value, false, deadline);
}

/* ---- The card of rank 0: "1/port/secret/address,address" ----------------------------------------------- */

void td__launcher_card_write(const struct td__launcher_card *card, char text[TD__KV_VALUE])
{
    int length = snprintf(text, TD__KV_VALUE, "1/%d/%s/", card->port,
                          card->secret[0] ? card->secret : "-");
    for (int i = 0; i < card->count; i++)
        length += snprintf(text + length, TD__KV_VALUE - (size_t)length, "%s%s", i ? "," : "",
                           card->host[i]);
}

static bool take_field(const char **at, char end, char *text, size_t room)
{
    size_t length = strcspn(*at, (char[]){end, '\0'});
    if (length >= room || (*at)[length] != end)
        return false;
    memcpy(text, *at, length);
    text[length] = '\0';
    *at += length + 1;
    return true;
}

static bool is_number(const char *host)
{
    unsigned char bytes[16];
    return inet_pton(AF_INET, host, bytes) == 1 || inet_pton(AF_INET6, host, bytes) == 1;
}

static bool read_card(const char *text, struct td__launcher_card *card)
{
    char version[4], port[8], hosts[TD__KV_VALUE + 1];
    memset(card, 0, sizeof *card);
    if (!take_field(&text, '/', version, sizeof version) || strcmp(version, "1") != 0 ||
        !take_field(&text, '/', port, sizeof port) || !td__parse_int(port, 1, 65535, &card->port) ||
        !take_field(&text, '/', card->secret, sizeof card->secret) || strlen(text) >= TD__KV_VALUE)
        return false;
    if (!strcmp(card->secret, "-"))
        card->secret[0] = '\0';
    else if (strlen(card->secret) != 64 || strspn(card->secret, "0123456789abcdef") != 64)
        return false;
    snprintf(hosts, sizeof hosts, "%s,", text);
    for (const char *at = hosts; *at; card->count++)
        if (card->count == TD__KV_ADDRESSES ||
            !take_field(&at, ',', card->host[card->count], TD__KV_HOST) ||
            !is_number(card->host[card->count]))
            return false;
    return true;
}

td_status td__launcher_card_read(const char *text, struct td__launcher_card *card)
{
    return read_card(text, card)
               ? TD_OK
               : td_fail(TD_ERR_MISMATCH, "the address of rank 0 in the launcher's key-value space "
                                          "is malformed; do all ranks use the same version?");
}

/* ---- Addresses ---------------------------------------------------------------------------------------------- */

/* Those of the interfaces that are up, without loopback and link-local ones. */
static bool is_useful(const struct ifaddrs *entry)
{
    if (!entry->ifa_addr || !(entry->ifa_flags & IFF_UP) || (entry->ifa_flags & IFF_LOOPBACK))
        return false;
    if (entry->ifa_addr->sa_family == AF_INET6)
        return !IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)(void *)entry->ifa_addr)->sin6_addr);
    return entry->ifa_addr->sa_family == AF_INET;
}

static void number_of(const struct sockaddr *address, char host[TD__KV_HOST])
{
    const void *bytes =
        address->sa_family == AF_INET
            ? (const void *)&((const struct sockaddr_in *)(const void *)address)->sin_addr
            : (const void *)&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;
    if (!inet_ntop(address->sa_family, bytes, host, TD__KV_HOST))
        host[0] = '\0';
}

static void add_host(struct td__launcher_card *card, const char *host)
{
    for (int i = 0; i < card->count; i++)
        if (!strcmp(card->host[i], host))
            return;
    if (*host && card->count < TD__KV_ADDRESSES)
        snprintf(card->host[card->count++], TD__KV_HOST, "%s", host);
}

static td_status list_own(struct td__launcher_card *card)
{
    struct ifaddrs *list;
    char host[64];
    if (td__route_address(host, sizeof host))
        add_host(card, host);
    if (getifaddrs(&list))
        return td_fail(TD_ERR_SYSTEM, "the addresses of this host cannot be listed; set "
                                      "MASTER_ADDR to that of rank 0");
    for (int family = AF_INET; card->count < TD__KV_ADDRESSES; family = AF_INET6) {
        for (struct ifaddrs *entry = list; entry; entry = entry->ifa_next)
            if (is_useful(entry) && entry->ifa_addr->sa_family == family) {
                number_of(entry->ifa_addr, host);
                add_host(card, host);
            }
        if (family == AF_INET6)
            break;
    }
    freeifaddrs(list);
    return card->count ? TD_OK
                       : td_fail(TD_ERR_SYSTEM,
                                 "mpi://: this host has no address but loopback, and the job spans "
                                 "several hosts; set MASTER_ADDR to the host of rank 0");
}

/* 2: an IPv4 address in a network of this host; 1: any; 0: one of this host's own, which a bridge of containers has on
 * every host. */
static int closeness(const struct ifaddrs *list, const char *host)
{
    struct in_addr address;
    char own[TD__KV_HOST];
    int best = 1;
    bool is_v4 = inet_pton(AF_INET, host, &address) == 1;
    for (const struct ifaddrs *entry = list; entry; entry = entry->ifa_next) {
        if (!is_useful(entry))
            continue;
        number_of(entry->ifa_addr, own);
        if (!strcmp(own, host))
            return 0;
        if (!is_v4 || entry->ifa_addr->sa_family != AF_INET || !entry->ifa_netmask)
            continue;
        in_addr_t mine = ((struct sockaddr_in *)(void *)entry->ifa_addr)->sin_addr.s_addr;
        in_addr_t mask = ((struct sockaddr_in *)(void *)entry->ifa_netmask)->sin_addr.s_addr;
        if ((mine & mask) == (address.s_addr & mask))
            best = 2;
    }
    return best;
}

static bool listens(const char *host, int port)
{
    struct td__address_list list;
    bool retry;
    if (td__resolve(host, port, td__deadline_in_ms(PROBE_MS), &list, &retry) || !list.count)
        return false;
    int fd = td__connect_to(&list.at[0], td__deadline_in_ms(PROBE_MS));
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

/* The address of rank 0 for this rank. A rank on the same host takes one of its own, if no other answers. */
static td_status choose(const struct td__launcher_card *card, char host[TD__KV_HOST])
{
    struct ifaddrs *list = NULL;
    getifaddrs(&list);
    int chosen = -1;
    for (int close = 2; close >= 0 && chosen < 0; close--)
        for (int i = 0; i < card->count && chosen < 0; i++)
            if (closeness(list, card->host[i]) == close && listens(card->host[i], card->port))
                chosen = i;
    freeifaddrs(list);
    snprintf(host, TD__KV_HOST, "%s", card->host[chosen < 0 ? 0 : chosen]);
    if (chosen >= 0)
        return TD_OK;
    char all[TD__KV_VALUE] = "";
    for (int i = 0; i < card->count; i++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : "", card->host[i]);
    return td_fail(TD_ERR_TIMEOUT,
                   "mpi://: none of the addresses of rank 0 (%s) can be reached at port %d; is "
                   "there a firewall? MASTER_ADDR and MASTER_PORT choose another way",
                   all, card->port);
}

/* ---- The rendezvous --------------------------------------------------------------------------------------------- */

static const char made_by_rank_0[] =
    "rank 0 has made it, and the other ranks got it through MPI's launcher; set TANDEM_SECRET to choose it yourself";

static td_status open_first(const td_rendezvous_options *options,
                            struct td__rendezvous_state *state, td__deadline deadline)
{
    struct td__launcher_card card = {0};
    struct td__secret secret;
    char text[TD__KV_VALUE];
    TD_TRY(list_own(&card));
    TD_TRY(td__secret_load(NULL, &secret));
    if (!secret.given && !secret.insecure) {
        TD_TRY(td__secret_make(card.secret));
        TD_TRY(td__secret_adopt(card.secret, made_by_rank_0));
    }
    TD_TRY(td__rendezvous_host(card.host[0], options, state, &card.port));
    td__launcher_card_write(&card, text);
    td_status status = td__launcher_kv_put(key, text, deadline);
    if (status) {
        struct td__error error;
        td__error_save(&error);
        td_store_close(state->world.store);
        return td__error_restore(&error);
    }
    settled.known = true;
    settled.port = card.port;
    snprintf(settled.host, sizeof settled.host, "%s", card.host[0]);
    return TD_OK;
}

static td_status find_first(td__deadline deadline)
{
    struct td__launcher_card card;
    struct td__secret secret;
    char text[TD__KV_VALUE];
    TD_TRY(td__launcher_kv_get(key, text, deadline));
    TD_TRY(td__launcher_card_read(text, &card));
    TD_TRY(td__secret_load(NULL, &secret));
    if (card.secret[0] && !secret.given)
        TD_TRY(td__secret_adopt(card.secret, made_by_rank_0));
    TD_TRY(choose(&card, settled.host));
    settled.port = card.port;
    settled.known = true;
    return TD_OK;
}

td_status td__rendezvous_by_launcher(const td_rendezvous_options *options,
                                     struct td__rendezvous_state *state)
{
    int64_t timeout = options->timeout_ms ? options->timeout_ms : TD_STORE_DEFAULT_TIMEOUT_MS;
    td__deadline deadline = td__deadline_in_ms(timeout);
    td_world *world = &state->world;
    if (!settled.known && world->rank == 0)
        return open_first(options, state, deadline);
    if (!settled.known)
        TD_TRY(find_first(deadline));
    return td__rendezvous_open(settled.host, settled.port, world->rank, world->world_size, options,
                               state);
}
