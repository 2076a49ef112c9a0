"""Choose the fastest correct function for every signature and M of an archive, on the GPUs at hand.

Reads a candidate archive and writes a tuned one; needs torch and GPUs of one of the archive's targets, and no compiler.
Every function is checked before it is timed. Entries for other targets pass through as they are, so that one archive
can be tuned on one machine after the other. `run.tune_archive` is where it begins; it imports no torch, since measuring
is done by processes that do. What is particular to an operation (operands, reference, tolerance, baseline, the least
that it takes) is behind `operation`: in a folder beside `aot/tune/gemm/`, or another package.

Of each signature, in order:

1. `measure` checks every candidate at M = 1, 3, 17, 333 and wherever it is timed, against float32, or float64 where
   that is cheap: by the norm of the error, and element by element. A function that is wrong once is out of the table.
2. `points` names M to time at: the manifest's and powers of two first, then where another function than the predicted
   best may save most, until 0.2% cannot be saved.
3. `halving` times the likely functions at one M briefly, the better half longer, and the last four in turns with what
   torch runs, for GEMMs cuBLAS. Where operations take long beside bytes, power bounds (`roofline`): after a
   pause the clock is higher than later on, from which functions gain unequally, so all of a point is timed after a
   brief load. With `--sustained` those of the last four that are within 3% are timed there also for 150 ms without
   pause, because an H200 then lowers its clock to what power allows; best is then the least product of both times.
4. `calibrate` predicts every function's time at every M from its estimate and all that was measured.
5. Of a GEMM that torch came near to somewhere, the likeliest functions are looked at beside each other and torch, at M
   between those points: of many predictions the best is mostly too good.
6. `choose` keeps few functions, each within `--tolerance` of the best somewhere, and makes ranges of M of them. A
   change of function must save more than a prediction can tell.
7. What will serve and was not looked at is timed briefly beside torch at the same M: another library's kernels may
   change there, and callers who want the faster of both (`on_slower`) are to have it.

`forms` checks and times the functions of forms and chooses none of them: what is wrong is taken out, and estimates are
corrected. `journal` lets a killed run go on, and `history` keeps what was seen.
"""
