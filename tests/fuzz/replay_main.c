/* Runs a fuzz target once over each file that is named, or that stands in a directory that is
 * named. With no libFuzzer needed, this keeps the seeds and past findings in the ordinary tests. */
#include "fuzz.h"

#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static bool complain(const char *path)
{
    fprintf(stderr, "replay: cannot read %s: %s\n", path, strerror(errno));
    return false;
}

/* The input lies in memory of exactly its size, so that a sanitizer sees every step past its end. */
static bool replay_file(const char *path, size_t size)
{
    bool ok = false;
    uint8_t *data = malloc(size);
    FILE *file = fopen(path, "rb");
    if (file && data)
        ok = fread(data, 1, size, file) == size;
    if (!ok)
        complain(path);
    if (file)
        fclose(file);
    if (ok) {
        /* Printed first, so that the last line of a crash names its input. */
        printf("replay: %s\n", path);
        fflush(stdout);
        LLVMFuzzerTestOneInput(data, size);
    }
    free(data);
    return ok;
}

static bool replay_path(const char *path, bool into_directory, int *count)
{
    struct stat info;
    if (stat(path, &info))
        return complain(path);
    if (S_ISREG(info.st_mode)) {
        ++*count;
        return replay_file(path, (size_t)info.st_size);
    }
    if (!S_ISDIR(info.st_mode) || !into_directory)
        return true;

    struct dirent **entries;
    int entry_count = scandir(path, &entries, NULL, alphasort);
    if (entry_count < 0)
        return complain(path);
    bool ok = true;
    for (int i = 0; i < entry_count; i++) {
        char *entry_path = NULL;
        if (asprintf(&entry_path, "%s/%s", path, entries[i]->d_name) < 0)
            abort();
        ok &= replay_path(entry_path, false, count);
        free(entry_path);
        free(entries[i]);
    }
    free(entries);
    return ok;
}

int main(int argc, char **argv)
{
    int count = 0;
    bool ok = true;
    for (int i = 1; i < argc; i++)
        ok &= replay_path(argv[i], true, &count);
    if (count == 0) {
        fprintf(stderr, "replay: no input found; usage: %s FILE-OR-DIRECTORY…\n", argv[0]);
        return 1;
    }
    printf("replay: %d inputs\n", count);
    return ok ? 0 : 1;
}
