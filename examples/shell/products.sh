#!/bin/sh
# A complex product from the shell, compared with awk's own: curl, awk, od and printf are all it takes.
#
#   GEMMSERVE_SERVER=http://127.0.0.1:8000 GEMMSERVE_API_KEY=gs_... sh products.sh
set -eu
server=${GEMMSERVE_SERVER:-http://127.0.0.1:8000}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

# The key in a file that curl reads: arguments are seen by everybody on the machine. Nobody else reads this folder.
: >curlrc
[ -z "${GEMMSERVE_API_KEY:-}" ] || printf 'header = "Authorization: Bearer %s"\n' "$GEMMSERVE_API_KEY" >curlrc

# field NAME: print the first string of that name in the JSON on standard input. With jq: jq -r .NAME
field() { awk -F"\"$1\" *: *\"" 'NF > 1 { sub(/".*/, "", $2); print $2 }'; }

# request PATH ARGUMENT...: send one; print the body of the answer, or say what the problem is and fail.
request() {
  path=$1
  shift
  : >answer # curl leaves it alone where there is no body
  status=$(curl --config curlrc --silent --show-error --output answer --write-out '%{http_code}' "$@" "$server$path")
  [ "$status" -lt 400 ] || { echo "$status $(field title <answer): $(field detail <answer)" >&2; return 1; }
  cat answer
}

# npy ROWS COLUMNS: write the complex numbers on standard input, a line "re im" each, as a complex64 .npy file.
npy() {
  printf '\223NUMPY\001\000v\000%-117s\n' "{'descr': '<c8', 'fortran_order': False, 'shape': ($1, $2), }"
  # shellcheck disable=SC2059 # the format is what awk makes: octal escapes
  printf "$(awk '
    function float32(x,   sign, exponent, mantissa) { # whole numbers of up to 24 bits
      if (x == 0) return "\\000\\000\\000\\000"
      sign = x < 0; x = sign ? -x : x; exponent = 127
      while (x >= 2) { x /= 2; exponent++ }
      mantissa = (x - 1) * 8388608
      return sprintf("\\%03o\\%03o\\%03o\\%03o", mantissa % 256, int(mantissa / 256) % 256,
                     (exponent % 2) * 128 + int(mantissa / 65536), sign * 128 + int(exponent / 2))
    }
    { printf "%s%s", float32($1), float32($2) }')"
}

# numbers: print the float32 numbers on standard input, one a line.
numbers() { od -An -v -tf4 | awk '{ for (i = 1; i <= NF; i++) print $i + 0 }'; }

# Whole numbers, so that every sum is exact and results can be compared by cmp.
m=5 k=7 n=3
random() { awk -v seed="$1" -v count="$2" 'BEGIN { srand(seed); while (count--) print int(19 * rand()) - 9, int(19 * rand()) - 9 }'; }
random $$ $((m * k)) >a
random $(($$ + 1)) $((k * n)) >b
npy $m $k <a >a.npy
npy $k $n <b >b.npy
awk -v m=$m -v k=$k -v n=$n '
  NR <= m * k { re[NR] = $1; im[NR] = $2; next }
  { u[NR - m * k] = $1; v[NR - m * k] = $2 }
  END {
    for (i = 0; i < m; i++) for (j = 0; j < n; j++) {
      x = y = 0
      for (p = 0; p < k; p++) {
        l = i * k + p + 1; r = p * n + j + 1
        x += re[l] * u[r] - im[l] * v[r]; y += re[l] * v[r] + im[l] * u[r]
      }
      print x; print y
      power[j] += x * x + y * y
    }
    for (j = 0; j < n; j++) print power[j] >"power"
  }' a b >expected

# One product: operands there, result back.
request /v1/gemm --form a=@a.npy --form b=@b.npy | tail -c $((8 * m * n)) | numbers >d
cmp d expected
echo "gemm: as awk has it"

# Operands that are used more than once are uploaded once; jobs on them survive crashes. With its Idempotency-Key a
# job may be sent again: it is not done twice.
ida=$(request '/v1/arrays?ttl_s=3600' --header 'Content-Type: application/x-npy' --data-binary @a.npy | field id)
idb=$(request '/v1/arrays?ttl_s=3600' --header 'Content-Type: application/x-npy' --data-binary @b.npy | field id)
job() { # JSON: submit it, wait for its end, print it
  key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  request /v1/jobs --header 'Content-Type: application/json' --header 'Prefer: wait=30' \
    --header "Idempotency-Key: $key" --retry 3 --data-binary "$1" >job
  while state=$(field state <job); [ "$state" = queued ] || [ "$state" = running ]; do
    request "/v1/jobs/$(field id <job)?wait=30" >job
  done
  [ "$state" = succeeded ] || { cat job >&2; return 1; }
  cat job
}
result=$(job "{\"op\": \"gemm\", \"a\": \"$ida\", \"b\": \"$idb\"}" | field d)
request "/v1/arrays/$result/data" --header 'Accept: application/octet-stream' | numbers >d
cmp d expected
echo "job: $(field state <job) by $(field algorithm <job)"

# The power in each column of the product, without the product.
result=$(job "{\"op\": \"gemm_reduce\", \"a\": \"$ida\", \"b\": \"$idb\", \"reduce\": \"sumsq\"}" | field sumsq)
request "/v1/arrays/$result/data" --header 'Accept: application/octet-stream' | numbers >d
cmp d power
echo "gemm_reduce: as awk has it"

# What the server refuses comes with its explanation.
if request /v1/gemm --form a=@a.npy --form b=@a.npy 2>problem; then
  echo "shapes that do not fit were accepted" >&2
  exit 1
fi
cat problem

for id in "$ida" "$idb"; do request "/v1/arrays/$id" --request DELETE >deleted; done
