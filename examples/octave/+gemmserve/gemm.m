function d = gemm(a, b, params)
% GEMM  Return alpha op(a) op(b), computed by the server in one exchange; nothing is kept there.
%
%   d = gemmserve.gemm(a, b)
%   d = gemmserve.gemm(a, b, struct('trans_a', 'C', 'alpha', 2))
%
%   params: fields as the page HTTP of the documentation names them. A complex alpha is [real imaginary].
  if nargin < 3
    params = struct();
  end
  files = {[tempname() '.npy'], [tempname() '.npy']};
  cleaner = onCleanup(@() cellfun(@delete, files));
  gemmserve.write_npy(files{1}, a);
  gemmserve.write_npy(files{2}, b);
  params.order = 'F'; % column-major, as arrays are here
  d = gemmserve.read_npy(gemmserve.request('/v1/gemm', '--form-string', ['params=' jsonencode(params)], ...
                                           '--form', ['a=@' files{1}], '--form', ['b=@' files{2}]));
end
