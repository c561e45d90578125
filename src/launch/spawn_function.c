/* The address of a function in another process of the same program; see spawn.h.
 *
 * The loader places modules at random addresses, so a function is named by its module and its offset there. Both
 * processes must have the same build of the module: the fingerprint covers the program headers, which have the sizes
 * of all segments, and the notes, which have the build id where the linker wrote one. Symbols would not do: most
 * functions that are given to td_spawn() are static. */
#include "launch/spawn.h"

#include "base/fail.h"
#include "base/map.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>

/* A module is looked for by an address in it, or by its fingerprint. */
struct search {
    uintptr_t address; /* 0: by fingerprint */
    uint64_t fingerprint;
    int visited;
    bool found;
    bool is_program; /* the first module is the program */
    uintptr_t base;
    const char *name;
};

static bool has_address(const struct dl_phdr_info *module, uintptr_t address, size_t size)
{
    for (int i = 0; i < module->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &module->dlpi_phdr[i];
        uintptr_t start = module->dlpi_addr + segment->p_vaddr;
        if (segment->p_type == PT_LOAD && address >= start && address - start < segment->p_memsz &&
            size <= segment->p_memsz - (address - start))
            return true;
    }
    return false;
}

static uint64_t fingerprint_of(const struct dl_phdr_info *module)
{
    uint64_t hash = td__hash(TD__HASH_START, module->dlpi_phdr,
                             sizeof *module->dlpi_phdr * module->dlpi_phnum);
    for (int i = 0; i < module->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &module->dlpi_phdr[i];
        uintptr_t start = module->dlpi_addr + segment->p_vaddr;
        if (segment->p_type == PT_NOTE && has_address(module, start, segment->p_memsz))
            hash = td__hash(hash, (const void *)start, segment->p_memsz);
    }
    return hash;
}

static int visit(struct dl_phdr_info *module, size_t size, void *arg)
{
    struct search *search = arg;
    (void)size;
    bool is_program = search->visited++ == 0;
    if (search->address && !has_address(module, search->address, 1))
        return 0;
    uint64_t fingerprint = fingerprint_of(module);
    if (!search->address && fingerprint != search->fingerprint)
        return 0;
    search->found = true;
    search->is_program = is_program;
    search->fingerprint = fingerprint;
    search->base = module->dlpi_addr;
    search->name = module->dlpi_name;
    return 1;
}

td_status td__spawn_locate(td_spawn_fn fn, struct td__spawn_address *address)
{
    struct search search = {.address = (uintptr_t)fn};
    dl_iterate_phdr(visit, &search);
    if (!search.found)
        return td_fail(
            TD_ERR_INVALID,
            "td_spawn: the function was made at run time; a process that is started by exec can call only a "
            "function of the program or of a shared object");
    address->fingerprint = search.fingerprint;
    address->offset = (uintptr_t)fn - search.base;
    address->module[0] = '\0';
    /* An object that was loaded by a relative name: the child may have another directory. */
    if (!search.is_program && !realpath(search.name, address->module))
        snprintf(address->module, sizeof address->module, "%s", search.name);
    return TD_OK;
}

static bool find_module(uint64_t fingerprint, struct search *search)
{
    *search = (struct search){.fingerprint = fingerprint};
    dl_iterate_phdr(visit, search);
    return search->found;
}

td_status td__spawn_find(const struct td__spawn_address *address, td_spawn_fn *fn)
{
    struct search search;
    if (!find_module(address->fingerprint, &search)) {
        if (!*address->module)
            return td_fail(
                TD_ERR_STATE,
                "td_spawn_main: this is another build of the program than the one that called td_spawn()");
        if (!dlopen(address->module, RTLD_NOW))
            return td_fail(TD_ERR_STATE,
                           "td_spawn_main: the shared object of the function cannot be loaded: %s",
                           dlerror());
        if (!find_module(address->fingerprint, &search))
            return td_fail(
                TD_ERR_STATE,
                "td_spawn_main: %s is another build than in the process that called td_spawn()",
                address->module);
    }
    *fn = (td_spawn_fn)(search.base + address->offset);
    return TD_OK;
}

uint64_t td__library_fingerprint(void)
{
    struct search search = {.address = (uintptr_t)td__library_fingerprint};
    dl_iterate_phdr(visit, &search);
    return search.fingerprint;
}
