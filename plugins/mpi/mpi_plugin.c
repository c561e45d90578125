/* The plug-in "mpi": finds out which MPI this process was started with, and loads the backend that was built for it,
 * tandem_mpi/<name>.so beside this file. Neither Open MPI nor MPICH is loaded before a group needs it.
 *
 *     TANDEM_MPI                                    openmpi or mpich
 *     a libmpi that is in the process already       that one
 *     variables of a launcher                       OMPI_…, PMIX_…: Open MPI;  PMI_…: MPICH
 *     otherwise                                     the first one that was built and can be loaded */
#include <tandem/backend.h>
#include <tandem/plugin.h>

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct kind {
    const char *name, *shown, *library, *package;
};

static const struct kind kinds[] = {
    {"openmpi", "Open MPI", "libmpi.so.40", "openmpi-bin"},
    {"mpich", "MPICH", "libmpich.so.12", "mpich"},
};

enum { KINDS = sizeof kinds / sizeof *kinds };

static td_status create(const td_backend_context *context, void *arg, void **self);
static void destroy(void *self);

static const char *const any_device[] = {"*", NULL};

/* What is known before a backend is loaded; then it is that backend's table. */
static td_backend_ops ops = {
    .create = create,
    .destroy = destroy,
    .devices = any_device,
    .stage_devices = true,
    .breaks_with_members = true,
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const td_backend_ops *loaded;

/* ---- Which one ------------------------------------------------------------------------------------------ */

static bool is_set(const char *name)
{
    const char *value = getenv(name);
    return value && *value;
}

/* NULL: nothing says. */
static td_status find_kind(const struct kind **found)
{
    const char *wanted = getenv("TANDEM_MPI");
    *found = NULL;
    for (int i = 0; wanted && *wanted && i < KINDS; i++)
        if (!strcmp(wanted, kinds[i].name))
            *found = &kinds[i];
    if (wanted && *wanted && !*found)
        return td_fail(TD_ERR_INVALID,
                       "the variable TANDEM_MPI is \"%.40s\"; it is openmpi or mpich", wanted);
    for (int i = 0; !*found && i < KINDS; i++) {
        void *library = dlopen(kinds[i].library, RTLD_NOLOAD | RTLD_LAZY);
        if (library) {
            dlclose(library);
            *found = &kinds[i];
        }
    }
    if (!*found && (is_set("OMPI_COMM_WORLD_RANK") || is_set("PMIX_RANK")))
        *found = &kinds[0];
    if (!*found && (is_set("PMI_RANK") || is_set("PMI_FD") || is_set("PMI_PORT")))
        *found = &kinds[1];
    return TD_OK;
}

/* ---- Loading ---------------------------------------------------------------------------------------------- */

/* The folder was found safe when this plug-in was loaded; the file must be its owner's, or root's, too. */
static bool is_safe(const char *path, const struct stat *own)
{
    struct stat info;
    return !stat(path, &info) && S_ISREG(info.st_mode) && !(info.st_mode & S_IWOTH) &&
           (info.st_uid == own->st_uid || info.st_uid == 0);
}

static td_status load_kind(const struct kind *kind)
{
    char path[PATH_MAX];
    struct stat own;
    Dl_info info;
    if (!dladdr((void *)&ops, &info) || !info.dli_fname || stat(info.dli_fname, &own))
        return td_fail(TD_ERR_SYSTEM, "backend mpi: the file of the plug-in is not found");
    const char *slash = strrchr(info.dli_fname, '/');
    int folder = slash ? (int)(slash - info.dli_fname) + 1 : 0;
    snprintf(path, sizeof path, "%.*standem_mpi/%s.so", folder, info.dli_fname, kind->name);
    struct stat there;
    if (stat(path, &there))
        return td_fail(TD_ERR_UNSUPPORTED,
                       "backend mpi: this Tandem was built without %s, which the process was "
                       "started with: there is no %s; build it where mpicc of %s is, or use the "
                       "backend native",
                       kind->shown, path, kind->shown);
    if (!is_safe(path, &own))
        return td_fail(TD_ERR_AUTH, "backend mpi: other users can write to %s", path);
    /* Open MPI loads components that look for its symbols among those of the process. */
    if (!dlopen(kind->library, RTLD_NOW | RTLD_GLOBAL))
        return td_fail(TD_ERR_UNSUPPORTED,
                       "backend mpi: %s is not found at run time (%s); install it (Debian: %s), or "
                       "use the backend native",
                       kind->shown, dlerror(), kind->package);
    void *file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *symbol = file ? dlsym(file, "td_mpi_backend") : NULL;
    if (!symbol)
        return td_fail(TD_ERR_SYSTEM, "backend mpi: %s cannot be loaded: %s", path, dlerror());
    const td_backend_ops *(*table)(void);
    memcpy(&table, &symbol, sizeof table);
    loaded = table();
    return TD_OK;
}

/* With the lock. */
static td_status load(void)
{
    const struct kind *kind;
    td_status status = find_kind(&kind);
    if (status)
        return status;
    if (kind)
        return load_kind(kind);
    for (int i = 0; i < KINDS; i++) {
        status = load_kind(&kinds[i]);
        if (!status)
            break;
    }
    return status;
}

static td_status create(const td_backend_context *context, void *arg, void **self)
{
    td_status status = TD_OK;
    pthread_mutex_lock(&lock);
    if (!loaded) {
        status = load();
        if (!status)
            ops = *loaded; /* no group has used the table before */
    }
    pthread_mutex_unlock(&lock);
    return status ? status : loaded->create(context, arg, self);
}

static void destroy(void *self)
{
    (void)self; /* no group is created without the other table */
}

static td_status init(void)
{
    return td_register_backend("mpi", &ops, NULL);
}

TD_PLUGIN("mpi", "1.0", init)
