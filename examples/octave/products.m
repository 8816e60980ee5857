% PRODUCTS  Complex products from Octave, each compared with Octave's own.
%
%   GEMMSERVE_SERVER=http://127.0.0.1:8000 GEMMSERVE_API_KEY=gs_... octave-cli products.m
%
% The functions are in +gemmserve: copy that folder beside a program of one's own. They need curl and a POSIX shell.
addpath(fileparts(mfilename('fullpath')));

m = 96; k = 64; n = 32;
a = randn(k, m) + 1i * randn(k, m);
b = randn(k, n) + 1i * randn(k, n);
expected = a' * b;
% Each of the two products may be off by this much (Higham, Accuracy and Stability, 3.1; twice the terms, complex).
bound = 2 * 2 * (k + 2) * eps * (abs(a)' * abs(b));

% One product: operands there, result back.
d = gemmserve.gemm(a, b, struct('trans_a', 'C'));
assert(isequal(size(d), [m n]));
assert(all(all(abs(d - expected) <= bound)), 'the product exceeds its bound');
fprintf('gemm: largest difference %.1e\n', max(abs(d(:) - expected(:))));

% Operands that are used more than once are uploaded once; jobs on them survive crashes.
ida = gemmserve.upload(a);
idb = gemmserve.upload(b);
done = gemmserve.job(struct('op', 'gemm', 'a', ida, 'b', idb, 'trans_a', 'C', 'order', 'F'));
assert(all(all(abs(gemmserve.download(done.result.d) - expected) <= bound)), 'the result of the job exceeds its bound');
fprintf('job: %s by %s\n', done.state, done.algorithm);

% The power in each column of the product, without the product.
done = gemmserve.job(struct('op', 'gemm_reduce', 'a', ida, 'b', idb, 'trans_a', 'C', 'reduce', 'sumsq', 'axis', 'm'));
power = gemmserve.download(done.result.sumsq);
truth = sum(abs(expected) .^ 2).';
assert(isequal(size(power), [n 1]));
assert(all(abs(power - truth) <= sum(2 * abs(expected) .* bound + bound .^ 2).' + 2 * m * eps * truth), ...
       'the power exceeds its bound');
fprintf('gemm_reduce: largest relative difference %.1e\n', max(abs(power - truth) ./ truth));

% What the server refuses is an error with its explanation.
try
  gemmserve.gemm(a, b);
  error('products:accepted', 'shapes that do not fit were accepted');
catch problem
  assert(strcmp(problem.identifier, 'gemmserve:shape_mismatch'), problem.message);
  fprintf('%s\n', problem.message);
end

gemmserve.remove(ida);
gemmserve.remove(idb);
