/* C = A B in blocks of mc x nc x kc and register tiles of ROWS x VECTORS vectors of BYTES bytes.

   PACK_A, PACK_B: whether blocks are copied into strips as wide as a register tile. Strips that a matrix does not fill
   are always copied, with zeros behind it. work: strips of B, then of A, then one register tile. */
typedef float vec __attribute__((vector_size(BYTES), aligned(4)));
#define LANES (BYTES / 4)
#define COLUMNS (VECTORS * LANES)
/* Loaded once for all rows: left alone, gcc loads some operands again for each. */
#if defined(__x86_64__)
#define HELD(x) __asm__("" : "+v"(x))
#else
#define HELD(x)
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE long least(long x, long y) { return x < y ? x : y; }

INLINE void tile(long k, const float *a, long down, long along, const float *b, long row, float *c, long width, int add)
{
    vec sum[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++)
            sum[i][j] = (vec){0};
    for (long p = 0; p < k; p++) {
        vec y[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            y[j] = *(const vec *)(b + p * row + j * LANES);
            HELD(y[j]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            float x = a[i * down + p * along];
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++)
                sum[i][j] += x * y[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            vec *to = (vec *)(c + i * width + j * LANES);
            *to = add ? *to + sum[i][j] : sum[i][j];
        }
}

static void strip_of_a(const float *a, long width, long rows, long k, float *to)
{
    for (long i = 0; i < ROWS; i++)
        for (long p = 0; p < k; p++)
            to[p * ROWS + i] = i < rows ? a[i * width + p] : 0;
}

static void strip_of_b(const float *b, long width, long columns, long k, float *to)
{
    for (long p = 0; p < k; p++)
        if (columns == COLUMNS)
            for (long j = 0; j < COLUMNS; j++)
                to[p * COLUMNS + j] = b[p * width + j];
        else
            for (long j = 0; j < COLUMNS; j++)
                to[p * COLUMNS + j] = j < columns ? b[p * width + j] : 0;
}

/* A register tile by how its operands lie: functions of their own, so that the sums have all registers. */
#define TILE(name, down, along, row)                                                                                   \
    static __attribute__((noinline)) void name(long k, const float *a, long wide_a, const float *b, long wide_b,       \
                                               float *c, long width, int add)                                          \
    {                                                                                                                  \
        tile(k, a, down, along, b, row, c, width, add);                                                                \
    }
TILE(rows_rows, wide_a, 1, wide_b)
TILE(rows_strips, wide_a, 1, COLUMNS)
TILE(strips_rows, 1, ROWS, wide_b)
TILE(strips_strips, 1, ROWS, COLUMNS)

typedef void kernel(long, const float *, long, const float *, long, float *, long, int);
static kernel *const kernels[2][2] = {{rows_rows, rows_strips}, {strips_rows, strips_strips}};

void product(long m, long n, long k, const float *a, const float *b, float *c, long mc, long nc, long kc, float *work)
{
    float *strips_b = work, *strips_a = work + kc * ((nc + COLUMNS - 1) / COLUMNS) * COLUMNS;
    float *own = strips_a + kc * ((mc + ROWS - 1) / ROWS) * ROWS;
    for (long j0 = 0; j0 < n; j0 += nc)
        for (long p0 = 0; p0 < k; p0 += kc) {
            long columns = least(nc, n - j0), depth = least(kc, k - p0);
            for (long j = 0; j < columns; j += COLUMNS)
                if (PACK_B || columns - j < COLUMNS)
                    strip_of_b(b + p0 * n + j0 + j, n, least(COLUMNS, columns - j), depth, strips_b + j * kc);
            for (long i0 = 0; i0 < m; i0 += mc) {
                long rows = least(mc, m - i0);
                for (long i = 0; i < rows; i += ROWS)
                    if (PACK_A || rows - i < ROWS)
                        strip_of_a(a + (i0 + i) * k + p0, k, least(ROWS, rows - i), depth, strips_a + i * kc);
                for (long j = 0; j < columns; j += COLUMNS)
                    for (long i = 0; i < rows; i += ROWS) {
                        int own_a = PACK_A || rows - i < ROWS, own_b = PACK_B || columns - j < COLUMNS;
                        int whole = rows - i >= ROWS && columns - j >= COLUMNS;
                        const float *from_a = own_a ? strips_a + i * kc : a + (i0 + i) * k + p0;
                        const float *from_b = own_b ? strips_b + j * kc : b + p0 * n + j0 + j;
                        float *to = c + (i0 + i) * n + j0 + j;
                        kernels[own_a][own_b](depth, from_a, k, from_b, n, whole ? to : own, whole ? n : COLUMNS,
                                              whole && p0 > 0);
                        if (!whole)
                            for (long r = 0; r < least(ROWS, rows - i); r++)
                                for (long s = 0; s < least(COLUMNS, columns - j); s++)
                                    to[r * n + s] = (p0 > 0 ? to[r * n + s] : 0) + own[r * COLUMNS + s];
                    }
            }
        }
}
