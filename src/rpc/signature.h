/* Signatures of functions, "add(x: tensor, y: tensor, alpha: float = 1)"; see td_rpc_register(). */
#ifndef TD_RPC_SIGNATURE_H
#define TD_RPC_SIGNATURE_H

#include "rpc/value_internal.h"

struct td__signature;

/** Parses a signature. TD_ERR_INVALID with the place of the mistake. */
td_status td__signature_parse(const char *text, struct td__signature **signature);
void td__signature_free(struct td__signature *signature);

/** The name of the function, without its parameters. */
const char *td__signature_name(const struct td__signature *signature);

/** The arguments of a call. */
struct td__bound {
    td_value **values; /* `few`, or memory of their own */
    int count;
    td_value *few[8];
};

/**
 * Puts the arguments of a call in the order of the parameters, checks their number and types, and fills in defaults.
 * `args` is a list or NULL, `kwargs` a map or NULL. Each of the bound values has one reference, for
 * td__bound_free(). TD_ERR_INVALID: "add() takes 2 to 3 arguments, not 4", "add(): argument 1 (y) is of type
 * text, not tensor", "add() has no parameter z", "add(): x is given twice", "add(): y is missing".
 */
td_status td__signature_bind(const struct td__signature *signature, const td_value *args,
                             const td_value *kwargs, struct td__bound *bound);
void td__bound_free(struct td__bound *bound);

#endif
