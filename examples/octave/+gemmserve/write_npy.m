function write_npy(file, a)
% WRITE_NPY  Write an array of class single or double, real or complex, as a .npy file in column-major order.
%
%   gemmserve.write_npy(file, a)
  if ~isfloat(a)
    error('gemmserve:class', 'an array of class %s cannot be sent: convert it by single() or double()', class(a));
  end
  bytes = 4 + 4 * isa(a, 'double');
  values = full(reshape(a, 1, []));
  kind = 'f';
  if ~isreal(a) % real and imaginary parts in turns
    values = reshape([real(values); imag(values)], 1, []);
    kind = 'c';
    bytes = 2 * bytes;
  end
  header = sprintf('{''descr'': ''<%s%d'', ''fortran_order'': True, ''shape'': (%s), }', ...
                   kind, bytes, sprintf('%d, ', size(a)));
  header = [header repmat(' ', 1, mod(-(11 + numel(header)), 64)) sprintf('\n')]; % data begin at a multiple of 64
  stream = fopen(file, 'w', 'ieee-le');
  if stream < 0
    error('gemmserve:file', 'cannot write %s', file);
  end
  cleaner = onCleanup(@() fclose(stream));
  fwrite(stream, [147 double('NUMPY') 1 0], 'uint8');
  fwrite(stream, numel(header), 'uint16');
  fwrite(stream, header, 'uint8');
  fwrite(stream, values, class(values));
end
