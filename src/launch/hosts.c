/* The list of hosts, and the command that starts tdrun on one; see hosts.h. */
#include "launch/hosts.h"

#include "base/fail.h"
#include "base/host.h"
#include "base/number.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINE_ROOM = 1024, MAX_WORDS = 64 };

/* ---- The list -------------------------------------------------------------------------------- */

/* "8", "auto", "gpu", "cpu". */
static bool is_slots(const char *text)
{
    int number;
    return td__parse_int(text, 1, TD__MAX_WORKERS, &number) || !strcmp(text, "auto") ||
           !strcmp(text, "cpu") || !strcmp(text, "gpu");
}

static td_status add(struct td__hosts *hosts, const char *name, size_t size, const char *slots)
{
    if (hosts->count == TD__MAX_NODES)
        return td_fail(TD_ERR_INVALID, "there are more than %d hosts", TD__MAX_NODES);
    struct td__host *more = realloc(hosts->at, (size_t)(hosts->count + 1) * sizeof *more);
    if (!more)
        return td__fail_nomem("hosts");
    hosts->at = more;
    struct td__host *host = &hosts->at[hosts->count++];
    *host = (struct td__host){0};
    snprintf(host->target, sizeof host->target, "%.*s", (int)size, name);
    snprintf(host->slots, sizeof host->slots, "%s", slots);
    return TD_OK;
}

/* An array that grew has moved. */
static void find_addresses(struct td__hosts *hosts)
{
    for (int i = 0; i < hosts->count; i++) {
        const char *at = strrchr(hosts->at[i].target, '@');
        hosts->at[i].address = at ? at + 1 : hosts->at[i].target;
    }
}

/* A host with a dash in front would be an option of ssh; one with other characters, a command. */
static bool is_name(const char *name, size_t size)
{
    if (!size || size > 255 || name[0] == '-' || name[0] == '@' || name[size - 1] == '@')
        return false;
    for (size_t i = 0; i < size; i++)
        if (!isalnum((unsigned char)name[i]) && !strchr("._-:%@", name[i]))
            return false;
    return true;
}

/* "a", "a:8", "user@a:8", "[fe80::1]:8", "fe80::1". */
static td_status add_item(struct td__hosts *hosts, const char *item)
{
    const char *name = item, *slots = "";
    size_t size = strlen(item);
    const char *colon = strchr(item, ':');
    if (item[0] == '[' && strchr(item, ']')) {
        const char *end = strchr(item, ']');
        name = item + 1;
        size = (size_t)(end - name);
        slots = end[1] == ':' ? end + 2 : "";
        if (end[1] && end[1] != ':')
            size = 0;
    } else if (colon && !strchr(colon + 1, ':')) {
        size = (size_t)(colon - item);
        slots = colon + 1;
        if (!*slots)
            size = 0;
    }
    if (!is_name(name, size))
        return td_fail(TD_ERR_INVALID, "\"%.100s\" is no host; it is written HOST or HOST:WORKERS",
                       item);
    if (*slots && !is_slots(slots))
        return td_fail(TD_ERR_INVALID,
                       "\"%.100s\": behind the colon stands how many workers the host gets: a "
                       "number, gpu, cpu or auto",
                       item);
    return add(hosts, name, size, slots);
}

td_status td__hosts_parse(const char *list, struct td__hosts *hosts)
{
    char item[LINE_ROOM];
    for (const char *at = list;; at++) {
        size_t size = strcspn(at, ",");
        snprintf(item, sizeof item, "%.*s", (int)(size < sizeof item ? size : sizeof item - 1), at);
        TD_TRY(add_item(hosts, item));
        at += size;
        if (!*at)
            break;
    }
    find_addresses(hosts);
    return TD_OK;
}

/* "a", "a:8", "a slots=8", "a 8"; a line without a host is empty. */
static td_status add_line(struct td__hosts *hosts, char *line)
{
    char item[LINE_ROOM], *rest = NULL;
    line[strcspn(line, "#\r\n")] = '\0';
    char *name = strtok_r(line, " \t", &rest), *slots = strtok_r(NULL, " \t", &rest);
    if (!name)
        return TD_OK;
    if (slots && !strncmp(slots, "slots=", 6))
        slots += 6;
    if (slots && !is_slots(slots))
        return td_fail(TD_ERR_INVALID, "\"%.100s\" is no number of workers", slots);
    snprintf(item, sizeof item, "%s%s%s", name, slots ? ":" : "", slots ? slots : "");
    return add_item(hosts, item);
}

td_status td__hosts_read(const char *path, struct td__hosts *hosts)
{
    char line[LINE_ROOM];
    FILE *file = fopen(path, "re");
    td_status status = TD_OK;
    if (!file)
        return td_fail(TD_ERR_INVALID, "cannot read %s: %s", path, td__errno_text(errno));
    for (int number = 1; !status && fgets(line, sizeof line, file); number++) {
        status = add_line(hosts, line);
        if (status)
            status = td_fail(status, "%s, line %d: %s", path, number, td__error_text());
    }
    fclose(file);
    if (!status && !hosts->count)
        status = td_fail(TD_ERR_INVALID, "%s has no host", path);
    find_addresses(hosts);
    return status;
}

void td__hosts_free(struct td__hosts *hosts)
{
    free(hosts->at);
    *hosts = (struct td__hosts){0};
}

/* ---- The command ----------------------------------------------------------------------------- */

/* Whether the host is this one, so that nothing has to be started elsewhere. */
static bool is_here(const struct td__host *host)
{
    return !strcmp(host->address, "localhost") || !strcmp(host->address, "127.0.0.1") ||
           !strcmp(host->address, td__host_name());
}

/* What is run there: tdrun at the same place as here, unless the user says otherwise. */
static td_status find_tdrun(const struct td__run_options *options, char path[PATH_MAX])
{
    if (options->remote_tdrun) {
        snprintf(path, PATH_MAX, "%s", options->remote_tdrun);
    } else {
        ssize_t size = readlink("/proc/self/exe", path, PATH_MAX - 1);
        if (size <= 0)
            return td_fail(TD_ERR_SYSTEM, "cannot find the file of this tdrun: %s",
                           td__errno_text(errno));
        path[size] = '\0';
    }
    return strchr(path, '\'') ? td_fail(TD_ERR_INVALID, "the path %s has a quote in it", path)
                              : TD_OK;
}

/* The words before the host, and what stands for it: ssh, pdsh and clush as they are known, others as they are given. */
static const char *complete_agent(const char *given)
{
    static const struct {
        const char *name, *whole;
    } known[] = {
        {"ssh", "ssh -T -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=10 -o "
                "ServerAliveCountMax=3"},
        {"clush", "clush -N -S -w"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(given, known[i].name))
            return known[i].whole;
    return given;
}

td_status td__hosts_command(const struct td__run_options *options, int index, char path[PATH_MAX],
                            char ***argv_out)
{
    const struct td__host *host = &options->hosts.at[index];
    const char *agent = complete_agent(options->launch_agent ? options->launch_agent : "ssh");
    char tdrun[PATH_MAX], first[256];
    int exit_code, words = 0;
    TD_TRY(find_tdrun(options, tdrun));
    size_t slots = MAX_WORDS + 3;
    size_t room = strlen(agent) + strlen(host->target) + strlen(tdrun) + 64;
    char **argv = calloc(1, slots * sizeof *argv + room);
    if (!argv)
        return td__fail_nomem("hosts");
    char *text = (char *)(argv + slots), *rest = NULL;
    if (!options->launch_agent && is_here(host)) {
        argv[0] = strcpy(text, tdrun);
        argv[1] = (char *)"serve";
        snprintf(path, PATH_MAX, "%s", tdrun);
        *argv_out = argv;
        return TD_OK;
    }
    char *command = text + sprintf(text, "exec '%s' serve", tdrun) + 1;
    char *target = strcpy(command, host->target);
    char *list = strcpy(target + strlen(target) + 1, agent);
    bool placed = false;
    for (char *word = strtok_r(list, " ", &rest); word && words < MAX_WORDS;
         word = strtok_r(NULL, " ", &rest)) {
        placed = placed || !strcmp(word, "{host}");
        argv[words++] = !strcmp(word, "{host}") ? target : word;
    }
    if (!placed)
        argv[words++] = target;
    argv[words] = text;
    snprintf(first, sizeof first, "%s", argv[0] == target ? "" : argv[0]);
    const char *name = strrchr(first, '/') ? strrchr(first, '/') + 1 : first;
    td_status status = TD_OK;
    if (!strcmp(name, "pdsh"))
        status = td_fail(TD_ERR_INVALID,
                         "--launch-agent: pdsh does not pass on its standard input, by which the "
                         "job's secret goes to the hosts; use ssh or clush");
    else if (!*name || td__find_program(first, path, &exit_code))
        status = td_fail(TD_ERR_INVALID, "--launch-agent: %s",
                         *name ? td__error_text() : "it names no program");
    if (status)
        free(argv);
    else
        *argv_out = argv;
    return status;
}
