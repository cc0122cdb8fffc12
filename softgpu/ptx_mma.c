/* Matrix products of a warp: mma.sync.aligned.m16n8k16 and m16n8k8 with half-precision factors, and ldmatrix.
 *
 * Which lane holds which element is fixed by PTX ("Matrix Fragments for mma.m16n8k16"): with group = lane / 4 and place = lane % 4,
 *   A register i, half h:  row group + 8 * (i & 1),   column place * 2 + h + 8 * (i >> 1)
 *   B register i, half h:  row place * 2 + h + 8 * i, column group
 *   C and D element i:     row group + 8 * (i >> 1),  column place * 2 + (i & 1)
 * Products are exact in a float; sums are taken in a double and rounded once, which is at least as close as the device.
 */
#include <string.h>

#include "ptx_exec.h"
#include "ptx_half.h"

static float widen(uint32_t word, uint32_t half, bool brain) {
    uint16_t h = (uint16_t)(word >> 16 * half);
    return brain ? ptx_bf16_to_f32(h) : ptx_f16_to_f32(h);
}

void ptx_mma(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in) {
    const struct ptx_ext *ext = in->ext;
    uint32_t k = in->aux, a_count = k / 4, b_count = k / 8;
    bool brain = in->type == PTX_BF16, narrow = in->sub == PTX_F16; /* type of the factors; of the sum */
    float a[16][16], b[16][8];
    double sum[16][8];
    const int32_t *v = ext->v; /* a, b, c, d, one after another */
    for (uint32_t lane = 0; lane < PTX_WARP; lane++) {
        uint32_t group = lane / 4, place = lane % 4;
        for (uint32_t i = 0; i < a_count; i++) {
            uint32_t word = ((const uint32_t *)(const void *)ptx_operand(frame, constants, v[i]))[lane];
            for (uint32_t h = 0; h < 2; h++) a[group + 8 * (i & 1)][place * 2 + h + 8 * (i >> 1)] = widen(word, h, brain);
        }
        for (uint32_t i = 0; i < b_count; i++) {
            uint32_t word = ((const uint32_t *)(const void *)ptx_operand(frame, constants, v[a_count + i]))[lane];
            for (uint32_t h = 0; h < 2; h++) b[place * 2 + h + 8 * i][group] = widen(word, h, brain);
        }
        for (uint32_t i = 0; i < 4; i++) {
            const unsigned char *c = ptx_operand(frame, constants, v[a_count + b_count + (narrow ? i / 2 : i)]);
            float x;
            if (narrow) x = widen(((const uint32_t *)(const void *)c)[lane], i & 1, false);
            else memcpy(&x, c + lane * 4, 4);
            sum[group + 8 * (i >> 1)][place * 2 + (i & 1)] = (double)x;
        }
    }
    for (uint32_t row = 0; row < 16; row++)
        for (uint32_t column = 0; column < 8; column++)
            for (uint32_t i = 0; i < k; i++) sum[row][column] += (double)(a[row][i] * b[i][column]);
    const int32_t *d = v + a_count + b_count + (narrow ? 2 : 4);
    for (uint32_t lane = 0; lane < PTX_WARP; lane++) {
        uint32_t group = lane / 4, place = lane % 4;
        for (uint32_t i = 0; i < 4; i++) {
            float x = (float)sum[group + 8 * (i >> 1)][place * 2 + (i & 1)];
            if (narrow) {
                uint16_t h = ptx_f32_to_f16(x);
                memcpy(frame->regs + d[i / 2] + lane * 4 + 2 * (i & 1), &h, 2);
            } else {
                x = ptx_canonical(x);
                memcpy(frame->regs + d[i] + lane * 4, &x, 4);
            }
        }
    }
}

/* Lane l gives the address of row l % 8 of matrix l / 8; lane l receives elements 2 (l % 4) and the next of row l / 4 of each matrix,
 * or, transposed, of column l / 4. */
int ptx_ldmatrix(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in) {
    uint64_t address[PTX_WARP];
    unsigned char *host[PTX_WARP];
    uint32_t matrices = in->ext->count, used = matrices == 4 ? PTX_FULL : (1u << 8 * matrices) - 1;
    ptx_addresses(in, ptx_operand(frame, w->constants, in->a), used, address);
    int error = ptx_resolve(w, warp, frame, in, in->sub, used, address, 16, false, host);
    if (error != 0) return error;
    uint32_t r[4][PTX_WARP];
    for (uint32_t i = 0; i < matrices; i++)
        for (uint32_t lane = 0; lane < PTX_WARP; lane++) {
            uint16_t pair[2];
            for (uint32_t h = 0; h < 2; h++) {
                uint32_t row = in->aux ? lane % 4 * 2 + h : lane / 4, column = in->aux ? lane / 4 : lane % 4 * 2 + h;
                memcpy(&pair[h], host[i * 8 + row] + column * 2, 2);
            }
            r[i][lane] = pair[0] | (uint32_t)pair[1] << 16;
        }
    for (uint32_t i = 0; i < matrices; i++) memcpy(frame->regs + in->ext->v[i], r[i], sizeof r[i]);
    return 0;
}
