# Complex products from R, each compared with R's own.
#
#   GEMMSERVE_SERVER=http://127.0.0.1:8000 GEMMSERVE_API_KEY=gs_... Rscript products.R
#
# The functions are in gemmserve.R: copy that file beside a program of one's own. It needs curl.
here <- dirname(sub("^--file=", "", grep("^--file=", commandArgs(FALSE), value = TRUE)))
source(file.path(here, "gemmserve.R"))

m <- 96; k <- 64; n <- 32
random <- function(rows, columns) {
  matrix(complex(real = rnorm(rows * columns), imaginary = rnorm(rows * columns)), rows, columns)
}
a <- random(k, m)
b <- random(k, n)
expected <- Conj(t(a)) %*% b
# Each of the two products may be off by half of this (Higham, Accuracy and Stability of Numerical Algorithms, 3.1, 3.6).
bound <- 4 * (k + 2) * .Machine$double.eps * (t(Mod(a)) %*% Mod(b))

# One product: operands there, result back.
d <- gs_gemm(a, b, trans_a = "C")
stopifnot("the product exceeds its bound" = identical(dim(d), dim(expected)) && all(Mod(d - expected) <= bound))
cat(sprintf("gemm: largest difference %.1e\n", max(Mod(d - expected))))

# Operands that are used more than once are uploaded once; jobs on them survive crashes.
ida <- gs_upload(a)
idb <- gs_upload(b)
job <- gs_job(op = "gemm", a = ida, b = idb, trans_a = "C", order = "F")
stopifnot("the result of the job exceeds its bound" = all(Mod(gs_download(job$result$d) - expected) <= bound))
cat(sprintf("job: %s by %s\n", job$state, job$algorithm))

# The power in each column of the product, without the product.
job <- gs_job(op = "gemm_reduce", a = ida, b = idb, trans_a = "C", reduce = "sumsq", axis = "m")
power <- gs_download(job$result$sumsq)
truth <- colSums(Mod(expected)^2)
allowed <- colSums(2 * Mod(expected) * bound + bound^2) + 2 * m * .Machine$double.eps * truth
stopifnot("the power exceeds its bound" = length(power) == n && all(abs(power - truth) <= allowed))
cat(sprintf("gemm_reduce: largest relative difference %.1e\n", max(abs(power - truth) / truth)))

# What the server refuses is an error with its explanation.
problem <- tryCatch(gs_gemm(a, b), gemmserve_error = identity)
stopifnot("shapes that do not fit were accepted" = identical(problem$slug, "shape-mismatch"))
cat(conditionMessage(problem), "\n", sep = "")

gs_remove(ida)
gs_remove(idb)
