/* Sound in a square tank of n x n cells with walls that stand still, and the adjoint of this simulation.

   u[t + 2] = 2 u[t + 1] - u[t] + m laplacian(u[t + 1]) + source, where m is the square of the speed of sound, in cells
   per step. Each of `count` transducers fires once, and all of them listen. */

static double laplacian(int n, const double *u, int cell)
{
    return u[cell - 1] + u[cell + 1] + u[cell - n] + u[cell + n] - 4 * u[cell];
}

static void advance(int n, const double *m, const double *before, const double *now, double *next)
{
    for (int row = 1; row < n - 1; row++)
        for (int cell = row * n + 1; cell < row * n + n - 1; cell++)
            next[cell] = 2 * now[cell] - before[cell] + m[cell] * laplacian(n, now, cell);
}

/* Write what is heard into the records, and the sound in the whole tank at all times onto the tapes, which start with
   two zeros for each cell: the tank at rest. */
void simulate(int n, int steps, int count, const double *m, const int *transducers, const double *pulse,
              double (*records)[steps][count], double (*tapes)[steps + 2][n * n])
{
    for (int shot = 0; shot < count; shot++) {
        double (*u)[n * n] = tapes[shot];
        for (int t = 0; t < steps; t++) {
            advance(n, m, u[t], u[t + 1], u[t + 2]);
            u[t + 2][transducers[shot]] += pulse[t];
            for (int k = 0; k < count; k++)
                records[shot][t][k] = u[t + 2][transducers[k]];
        }
    }
}

/* Add the gradient by m, for the upstream gradient of the records.

   The adjoint sound b is m times the gradient by u. It obeys the same equation backward in time, and the transducers
   that listened are its sources. b has room for steps + 2 tanks, and is given zeros. */
void adjoint(int n, int steps, int count, const double *m, const int *transducers, double (*tapes)[steps + 2][n * n],
             double (*upstream)[steps][count], double (*b)[n * n], double *gradient)
{
    for (int shot = 0; shot < count; shot++) {
        double (*u)[n * n] = tapes[shot];
        for (int t = steps - 1; t >= 0; t--) {
            advance(n, m, b[t + 2], b[t + 1], b[t]);
            for (int k = 0; k < count; k++)
                b[t][transducers[k]] += m[transducers[k]] * upstream[shot][t][k];
            for (int row = 1; row < n - 1; row++)
                for (int cell = row * n + 1; cell < row * n + n - 1; cell++)
                    gradient[cell] += b[t][cell] / m[cell] * laplacian(n, u[t + 1], cell);
        }
    }
}
