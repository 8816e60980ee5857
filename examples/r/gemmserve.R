# Complex and real matrix products on a gemmserve server, from base R and curl.
#
#   source("gemmserve.R")
#   d <- gs_gemm(a, b, trans_a = "C")
#
# GEMMSERVE_SERVER names the server, http://127.0.0.1:8000 by default, and GEMMSERVE_API_KEY the key. What the server
# refuses is an error of class "gemmserve_error" whose `slug` names the problem, for example "shape-mismatch".

# Send one request by curl; return the body of the answer, a raw vector. `...`: further arguments of curl.
gs_request <- function(path, ...) {
  file <- tempfile()
  on.exit(unlink(file))
  key <- Sys.getenv("GEMMSERVE_API_KEY")
  # By standard input: arguments are seen by everybody on the machine.
  config <- if (nzchar(key)) sprintf('header = "Authorization: Bearer %s"', key) else ""
  url <- paste0(Sys.getenv("GEMMSERVE_SERVER", "http://127.0.0.1:8000"), path)
  arguments <- c("--config", "-", "--silent", "--show-error", "--output", file, "--write-out", "%{http_code}", ..., url)
  said <- suppressWarnings(system2("curl", shQuote(arguments), stdout = TRUE, stderr = TRUE, input = config))
  if (!is.null(attr(said, "status"))) stop(paste(c("no answer:", said), collapse = " "), call. = FALSE)
  body <- if (file.exists(file)) readBin(file, "raw", file.size(file)) else raw()
  if (as.integer(said) >= 400) {
    text <- rawToChar(body)
    gs_stop(gs_field(text, "type"), gs_field(text, "title"), gs_field(text, "detail"), said)
  }
  body
}

# Raise a problem as an R condition.
gs_stop <- function(type, title, detail, status = "") {
  message <- if (is.na(title)) paste("HTTP status", status) else paste0(title, ": ", detail)
  stop(structure(class = c("gemmserve_error", "error", "condition"),
                 list(message = message, call = NULL, slug = sub(".*/", "", type))))
}

# Return a string of a JSON text by its name, NA if there is none. Base R reads no JSON, and the names asked for here
# occur once in the server's answers; programs that want more of them take the package jsonlite.
gs_field <- function(text, name) {
  found <- regmatches(text, regexec(sprintf('"%s" *: *"(([^"\\\\]|\\\\.)*)"', name), text))[[1]]
  if (length(found)) gsub("\\\\([\"\\\\/])", "\\1", found[2]) else NA_character_
}

# Return a list of strings, numbers and TRUE or FALSE as JSON. Complex numbers become [re, im].
gs_json <- function(fields) {
  value <- function(x) {
    x <- if (is.character(x)) paste0('"', gsub('(["\\\\])', "\\\\\\1", x), '"')
    else if (is.logical(x)) tolower(as.character(x))
    else if (is.complex(x)) sprintf("[%.17g, %.17g]", Re(x), Im(x))
    else sprintf("%.17g", x)
    if (length(x) == 1) x else paste0("[", paste(x, collapse = ", "), "]")
  }
  paste0("{", paste0('"', names(fields), '": ', vapply(fields, value, ""), collapse = ", "), "}")
}

# Write an array of doubles or complex numbers as a .npy file in column-major order.
gs_write_npy <- function(file, a) {
  if (!is.complex(a)) storage.mode(a) <- "double"
  shape <- if (is.null(dim(a))) length(a) else dim(a)
  header <- sprintf("{'descr': '%s', 'fortran_order': True, 'shape': (%s), }",
                    if (is.complex(a)) "<c16" else "<f8", paste0(shape, ", ", collapse = ""))
  header <- paste0(header, strrep(" ", -(11 + nchar(header)) %% 64), "\n") # data begin at a multiple of 64
  stream <- file(file, "wb")
  on.exit(close(stream))
  writeBin(c(as.raw(0x93), charToRaw("NUMPY"), as.raw(c(1, 0))), stream)
  writeBin(nchar(header), stream, size = 2, endian = "little")
  writeBin(charToRaw(header), stream)
  writeBin(as.vector(a), stream, endian = "little")
}

# Return the array of a .npy file, given as a raw vector. Integers (places, which count from 0) come as
# doubles.
gs_read_npy <- function(bytes) {
  stopifnot(identical(bytes[1:6], c(as.raw(0x93), charToRaw("NUMPY"))))
  width <- if (bytes[7] == 1) 2 else 4 # of the header's length
  start <- 8 + width + sum(as.integer(bytes[8 + seq_len(width)]) * 256^(seq_len(width) - 1))
  header <- rawToChar(bytes[(9 + width):start])
  descr <- sub(".*'descr': *'([^']*)'.*", "\\1", header)
  numbers <- regmatches(header, regexec("'shape': *\\(([^)]*)\\)", header))[[1]][2]
  shape <- as.numeric(regmatches(numbers, gregexpr("[0-9]+", numbers))[[1]])
  data <- bytes[-seq_len(start)]
  n <- prod(shape)
  parts <- function(what, size, n) readBin(data, what, n, size = size, endian = "little")
  pairs <- function(x) complex(real = x[c(TRUE, FALSE)], imaginary = x[c(FALSE, TRUE)])
  values <- switch(descr,
    "<f4" = parts("double", 4, n), "<f8" = parts("double", 8, n),
    "<c8" = pairs(parts("double", 4, 2 * n)), "<c16" = pairs(parts("double", 8, 2 * n)),
    "<i8" = colSums(matrix(readBin(data, "integer", 4 * n, size = 2, signed = FALSE, endian = "little"), 4) * 65536^(0:3)),
    stop("arrays of dtype ", descr, " cannot be read here", call. = FALSE))
  if (length(shape) < 2) values
  else if (grepl("'fortran_order': *True", header)) array(values, shape)
  else aperm(array(values, rev(shape))) # row-major: the last index runs first
}

# Upload an array; return its id, which jobs take as an operand until it is deleted. `query`: "?ttl_s=3600".
gs_upload <- function(a, query = "") {
  file <- tempfile(fileext = ".npy")
  on.exit(unlink(file))
  gs_write_npy(file, a)
  info <- gs_request(paste0("/v1/arrays", query), "--header", "Content-Type: application/x-npy",
                     "--data-binary", paste0("@", file))
  gs_field(rawToChar(info), "id")
}

# Return the array of that id.
gs_download <- function(id) {
  gs_read_npy(gs_request(paste0("/v1/arrays/", id, "/data"), "--header", "Accept: application/x-npy"))
}

# Delete the array of that id from the server.
gs_remove <- function(id) {
  gs_request(paste0("/v1/arrays/", id), "--request", "DELETE")
  invisible(NULL)
}

# Return alpha op(a) op(b), computed by the server in one exchange; nothing is kept there. `...`: fields of `params`
# as the page HTTP of the documentation names them.
gs_gemm <- function(a, b, ...) {
  files <- tempfile(c("a", "b"), fileext = ".npy")
  on.exit(unlink(files))
  gs_write_npy(files[1], a)
  gs_write_npy(files[2], b)
  params <- gs_json(list(..., order = "F")) # column-major, as arrays are here
  gs_read_npy(gs_request("/v1/gemm", "--form-string", paste0("params=", params),
                         "--form", paste0("a=@", files[1]), "--form", paste0("b=@", files[2])))
}

# Submit a job on stored arrays, wait for its end; return its id, state, algorithm, and `result`, a list of ids
# of arrays: job$result$d of gemm, one entry a reduction of gemm_reduce.
#
# It is on record before the server answers: it survives the end of this program and of the server. Sent again after an
# answer that was lost, it is not done twice, because of its key.
gs_job <- function(...) {
  # Not runif: programs that set its seed would repeat themselves.
  random <- file("/dev/urandom", "rb", raw = TRUE)
  on.exit(close(random))
  key <- paste(readBin(random, "raw", 16), collapse = "")
  answer <- gs_request("/v1/jobs", "--header", "Content-Type: application/json", "--header", "Prefer: wait=30",
                       "--header", paste0("Idempotency-Key: ", key), "--retry", "3",
                       "--data-binary", gs_json(list(...)))
  job <- rawToChar(answer)
  while (gs_field(job, "state") %in% c("queued", "running")) {
    job <- rawToChar(gs_request(paste0("/v1/jobs/", gs_field(job, "id"), "?wait=30")))
  }
  if (gs_field(job, "state") != "succeeded") {
    gs_stop(gs_field(job, "type"), gs_field(job, "title"), gs_field(job, "detail"))
  }
  found <- regmatches(job, regexec('"result" *: *\\{([^}]*)\\}', job))[[1]][2]
  names <- regmatches(found, gregexpr('"[^"]*"', found))[[1]] # each result, and the id of its array
  names <- gsub('"', "", names)
  result <- setNames(as.list(names[c(FALSE, TRUE)]), names[c(TRUE, FALSE)])
  list(id = gs_field(job, "id"), state = gs_field(job, "state"), algorithm = gs_field(job, "algorithm"), result = result)
}
