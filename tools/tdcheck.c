/* tdcheck: compares the operators of a device, and their gradients, with those of the host. tdcheck.h lists the files. */
#include "tdcheck.h"

#include "base/fail.h"
#include "base/number.h"
#include "launch/flags.h"

#include <tandem/data.h>

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_WRONG = 1, EXIT_USAGE = 2, SHOWN_FAILURES = 3 };

static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_F16,  TD_BF16,      TD_I64,
                                  TD_I32, TD_U8,  TD_BOOL, TD_COMPLEX64, TD_COMPLEX128};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

struct check_options {
    const char *device, *only;
    unsigned dtypes; /* bits */
    int seed;
    bool list, verbose, strict, help, version;
};

/* ---- The command line --------------------------------------------------------------------------------- */

static bool is_in_list(const char *list, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, name, length) && (at[length] == ',' || !at[length]))
            return true;
    return false;
}

static td_status set_only(const struct td__flag *flag, const char *value, void *target)
{
    for (const char *at = value;; at++) {
        size_t length = strcspn(at, ",");
        const struct check_row *row = check_rows;
        while (row->name && (strlen(row->name) != length || strncmp(row->name, at, length) != 0))
            row++;
        if (!row->name)
            return td_fail(TD_ERR_INVALID, "\"%.*s\" is not an operator; --list prints them",
                           (int)length, at);
        at += length;
        if (!*at)
            return td__flag_set_text(flag, value, target);
    }
}

static td_status set_dtypes(const struct td__flag *flag, const char *value, void *target)
{
    unsigned *bits = (unsigned *)((char *)target + flag->offset);
    *bits = 0;
    for (const char *at = value;; at++) {
        char name[32];
        size_t length = strcspn(at, ",");
        td_dtype dtype;
        snprintf(name, sizeof name, "%.*s", (int)length, at);
        if (!td_dtype_parse(name, &dtype) || !(BIT(dtype) & ALL_DTYPES))
            return td_fail(TD_ERR_INVALID,
                           "\"%s\" is not one of f32, f64, f16, bf16, i64, i32, u8, "
                           "bool, complex64, complex128",
                           name);
        *bits |= BIT(dtype);
        at += length;
        if (!*at)
            return TD_OK;
    }
}

#define AT(field) .offset = offsetof(struct check_options, field)

static const struct td__flag flags[] = {
    {"only", 'o', "NAME[,NAME...]", "these operators only", set_only, AT(only)},
    {"dtype", 'd', "TYPE[,TYPE...]", "these dtypes only", set_dtypes, AT(dtypes)},
    {"seed", 's', "N", "of the operands (1)", td__flag_set_int, AT(seed), 0, 1 << 30},
    {"strict", 0, NULL, "an operator that the device lacks is a failure", td__flag_set_bool,
     AT(strict)},
    {"list", 'l', NULL, "list the operators and their dtypes, and do nothing else",
     td__flag_set_bool, AT(list)},
    {"verbose", 'v', NULL, "also print why operators are missing, and every failure",
     td__flag_set_bool, AT(verbose)},
    {"help", 'h', NULL, "print this help", td__flag_set_bool, AT(help)},
    {"version", 'V', NULL, "print the version", td__flag_set_bool, AT(version)},
};
static const struct td__flag_table table = {flags, sizeof flags / sizeof *flags, NULL};

static void print_help(void)
{
    fputs("usage: tdcheck DEVICE [options]\n"
          "       tdcheck --list\n\n"
          "Compares the operators of a device, and their gradients, with those of the host.\n\n"
          "    tdcheck cuda:0\n"
          "    tdcheck toy:0 --only matmul,conv2d --dtype f32,bf16\n\n",
          stdout);
    td__flags_print(&table, stdout);
    fputs("\nThe exit code is 1 when a result was wrong, or the device cannot be used, and 2 when\n"
          "the command line is wrong.\n",
          stdout);
}

static td_status parse(int argc, char **argv, struct check_options *options)
{
    *options = (struct check_options){.dtypes = ALL_DTYPES, .seed = 1};
    while (argc > 1) {
        int rest;
        TD_TRY(td__flags_parse(&table, argc, argv, options, &rest));
        if (rest >= argc)
            break;
        if (options->device)
            return td_fail(TD_ERR_INVALID, "\"%s\": there can be one device only", argv[rest]);
        options->device = argv[rest];
        argc -= rest;
        argv += rest;
    }
    if (!options->device && !options->list && !options->help && !options->version)
        return td_fail(TD_ERR_INVALID, "the device is missing, such as cuda:0; see --help");
    return TD_OK;
}

/* ---- Reporting ----------------------------------------------------------------------------------------- */

void checker_passed(struct checker *checker, td_dtype dtype, double worst)
{
    checker->passed++;
    if (worst <= checker->worst)
        return;
    checker->worst = worst;
    checker->worst_dtype = dtype;
}

void checker_failed(struct checker *checker, td_dtype dtype, const char *inputs, const char *format,
                    ...)
{
    char text[CHECK_TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    checker->failed++;
    if (checker->failed > SHOWN_FAILURES && !checker->verbose)
        return;
    printf("FAIL    %s of %s: %s\n", checker->row->name, td_dtype_name(dtype), text);
    if (*inputs)
        printf("        operands: %s\n", inputs);
    printf("        again: %stdcheck %s --only %s --dtype %s --seed %llu\n",
           checker->may_wait ? "TANDEM_FALLBACK=cpu " : "", td_device_name(checker->device),
           checker->row->name, td_dtype_name(dtype), (unsigned long long)checker->seed);
    fflush(stdout); /* the next case may end the process */
}

void checker_refused(struct checker *checker, td_dtype dtype, const char *inputs, const char *call)
{
    if (td_last_status() != TD_ERR_UNSUPPORTED) {
        checker_failed(checker, dtype, inputs, "%s fails: %s", call, td_last_error());
        return;
    }
    if (checker->missing++ == 0)
        snprintf(checker->missing_text, sizeof checker->missing_text, "%s", td_last_error());
}

static void print_row(const struct checker *checker)
{
    const char *state = checker->failed    ? "failed"
                        : checker->passed  ? "passed"
                        : checker->missing ? "missing"
                                           : "skipped";
    printf("%-7s %-20s %5d passed", state, checker->row->name, checker->passed);
    if (checker->failed)
        printf(", %d failed", checker->failed);
    if (checker->missing)
        printf(", %d missing", checker->missing);
    if (checker->worst > 0)
        printf(", worst error %.3g of the tolerance (%s)", checker->worst,
               td_dtype_name(checker->worst_dtype));
    putchar('\n');
    if (checker->missing && checker->verbose)
        printf("        %s\n", checker->missing_text);
    fflush(stdout);
}

static void print_list(void)
{
    for (const struct check_row *row = check_rows; row->name; row++) {
        printf("%-20s", row->name);
        for (int i = 0; i < DTYPES; i++)
            if (row->dtypes & BIT(dtypes[i]))
                printf(" %s", td_dtype_name(dtypes[i]));
        putchar('\n');
    }
}

/* ---- Running ------------------------------------------------------------------------------------------- */

static void run_row(struct checker *checker, const struct check_row *row, unsigned chosen)
{
    checker->row = row;
    checker->passed = checker->failed = checker->missing = 0;
    checker->worst = 0;
    for (int i = 0; i < DTYPES; i++) {
        if (!(row->dtypes & chosen & BIT(dtypes[i])))
            continue;
        if (row->own) {
            row->own(checker, row, dtypes[i]);
            continue;
        }
        struct check_case c = {.row = row, .dtype = dtypes[i]};
        for (const char *at = row->shapes; check_next_shapes(&c, &at); c.number_of++)
            check_run(checker, &c);
    }
}

static bool is_chosen(const struct check_options *options, const struct check_row *row)
{
    return (!options->only || is_in_list(options->only, row->name)) &&
           row->dtypes & options->dtypes;
}

/* Another device of the kind, for copies between two. */
static td_device *other_of(td_device *device)
{
    char name[64];
    snprintf(name, sizeof name, "%s:%d", td_device_kind(device), td_device_index(device) ? 0 : 1);
    return td_device_index(device) >= 0 && td_device_exists(name) ? td_device_get(name) : NULL;
}

static int run_rows(const struct check_options *options, struct checker *checker)
{
    int rows = 0, failed = 0, missing = 0, cases = 0, missing_cases = 0, failed_cases = 0;
    for (const struct check_row *row = check_rows; row->name; row++)
        rows += is_chosen(options, row);
    td_progress *bar = td_progress_begin(
        &(td_progress_options){.total = rows, .label = "tdcheck", .unit = "operator"});
    for (const struct check_row *row = check_rows; row->name; row++) {
        if (!is_chosen(options, row))
            continue;
        run_row(checker, row, options->dtypes);
        print_row(checker);
        td_progress_step(bar, 1, NAN);
        failed += checker->failed > 0;
        missing += checker->missing > 0;
        cases += checker->passed + checker->failed + checker->missing;
        failed_cases += checker->failed;
        missing_cases += checker->missing;
    }
    td_progress_end(bar);
    check_slots_print(checker->device, !options->only && options->dtypes == ALL_DTYPES);
    td_status end = td_device_synchronize(checker->device);
    if (end)
        printf("FAIL    %s has failed: %s\n", td_device_name(checker->device), td_last_error());
    printf("%s: %d operators, %d failed, %d missing or missing in part; %d cases, %d failed, %d "
           "missing\n",
           td_device_name(checker->device), rows, failed, missing, cases, failed_cases,
           missing_cases);
    return failed || end || (options->strict && missing) ? EXIT_WRONG : 0;
}

int main(int argc, char **argv)
{
    struct check_options options;
    if (parse(argc, argv, &options)) {
        fprintf(stderr, "tdcheck: %s\n", td_last_error());
        return EXIT_USAGE;
    }
    if (options.help) {
        print_help();
        return 0;
    }
    if (options.version) {
        printf("tdcheck %s\n", td_version());
        return 0;
    }
    if (options.list) {
        print_list();
        return 0;
    }
    td_device *device = td_device_get(options.device);
    if (td_device_synchronize(device)) {
        fprintf(stderr, "tdcheck: %s\n", td_last_error());
        return EXIT_WRONG;
    }
    const char *fallback = getenv("TANDEM_FALLBACK");
    struct checker checker = {.device = device,
                              .other = other_of(device),
                              .seed = (uint64_t)options.seed,
                              .verbose = options.verbose,
                              .may_wait = fallback && !strcmp(fallback, "cpu")};
    check_slots_watch();
    return run_rows(&options, &checker);
}
