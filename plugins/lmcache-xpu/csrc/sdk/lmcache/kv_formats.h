/* Made by core/tools/gen_kv_formats.py from lmcache.v1.kv_layout; do not edit.
 *
 * One row per KV format. `levels` are the lists that a tensor is nested in, outermost first, and `axes` those of
 * the tensor, by letter:
 *
 *   L layers            2 K and V             N planes of a layer, each of its own width
 *   B blocks            S slots per block     P slots of all blocks in one axis
 *   H heads             W elements per head and slot; where K and V lie side by side, of both
 *   T tokens, without blocks
 *
 * Axes of size one are left out.
 */
#ifndef LMCACHE_KV_FORMATS_H
#define LMCACHE_KV_FORMATS_H

#include "abi.h"

typedef struct lmc_format_row {
    int id;
    int whole_pages; /* 1: a page may be moved whole, but not cut */
    const char *name;
    const char *levels;
    const char *axes;
} lmc_format_row;

/* The row with this id, or a null pointer. */
LMC_HOST_FN const lmc_format_row *lmc_format(int id)
{
    static const lmc_format_row rows[] = {
        {0, 0, "NB_NL_TWO_BS_NH_HS", "", "BL2SHW"},
        {1, 0, "NL_X_TWO_NB_BS_NH_HS", "L", "2BSHW"},
        {2, 0, "NL_X_NB_TWO_BS_NH_HS", "L", "B2SHW"},
        {3, 0, "NL_X_NB_BS_HS", "L", "BSW"},
        {4, 0, "TWO_X_NL_X_NBBS_NH_HS", "2L", "PHW"},
        {5, 0, "NL_X_NBBS_ONE_HS", "L", "PW"},
        {6, 0, "NL_X_TWO_NB_NH_BS_HS", "L", "2BHSW"},
        {7, 0, "NL_X_NB_TWO_NH_BS_HS", "L", "B2HSW"},
        {8, 0, "NB_NL_TWO_NH_BS_HS", "", "BL2HSW"},
        {9, 0, "TWO_X_NL_X_NB_BS_NH_HS", "2L", "BSHW"},
        {10, 0, "NL_X_NB_NH_BS_TWO_HS", "L", "BHSW"},
        {11, 0, "NL_X_NB_BS_NH_TWO_HS", "L", "BSHW"},
        {12, 0, "NL_X_NB_NH_BS_CS", "L", "BHSW"},
        {13, 0, "NL_X_NB_BS_NH_CS", "L", "BSHW"},
        {14, 1, "NL_X_NB_BSV_BSS", "L", "BSW"},
        {15, 0, "NL_X_TWO_NB_NH_ONE_BS_HS", "L", "2BHSW"},
        {16, 0, "NL_X_TWO_X_NB_BS_NH_HS", "L2", "BSHW"},
        {17, 0, "NL_X_NP_X_NB_BS_ONE_HS", "LN", "BSW"},
        {18, 0, "NL_X_NB_BS_NH_HS", "L", "BSHW"},
        {100, 0, "NL_X_TWO_X_ONE_NH_T_HS", "L2", "HTW"},
    };
    unsigned int at;
    for (at = 0; at < sizeof(rows) / sizeof(rows[0]); ++at)
        if (rows[at].id == id)
            return &rows[at];
    return 0;
}

#endif
