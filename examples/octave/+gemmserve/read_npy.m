function a = read_npy(bytes)
% READ_NPY  Return the array of a .npy file whose bytes are given as a row of uint8.
%
%   a = gemmserve.read_npy(bytes)
%
%   The file holds little-endian numbers of 4 or 8 bytes, real, complex or integer, as the server's results do but for
%   those of float16. Arrays of one dimension become columns.
  if numel(bytes) < 10 || ~isequal(bytes(1:6), uint8([147 double('NUMPY')]))
    error('gemmserve:npy', 'no .npy file');
  end
  wide = bytes(7) > 1; % the header's length has 2 bytes in version 1.0, 4 later
  place = 8 + 2 * (1 + wide);
  place = place + sum(double(bytes(9:place)) .* 256 .^ (0:place - 9));
  header = char(bytes(9:place));
  descr = regexp(header, '''descr'':\s*''([^'']*)''', 'tokens', 'once');
  shape = regexp(header, '''shape'':\s*\(([^)]*)\)', 'tokens', 'once');
  shape = cellfun(@str2double, regexp(shape{1}, '\d+', 'match'));
  classes = {'<f4', 'single', '<f8', 'double', '<c8', 'single', '<c16', 'double', '<i8', 'int64'};
  found = find(strcmp(classes(1:2:end), descr{1}));
  if isempty(found)
    error('gemmserve:npy', 'arrays of dtype %s cannot be read here', descr{1});
  end
  values = typecast(bytes(place + 1:end), classes{2 * found});
  if descr{1}(2) == 'c'
    values = complex(values(1:2:end), values(2:2:end));
  end
  if ~isempty(regexp(header, '''fortran_order'':\s*True', 'once')) || numel(shape) < 2
    a = reshape(values, [shape(:)' ones(1, 2 - numel(shape))]);
  else % row-major: the last index runs first
    a = permute(reshape(values, fliplr(shape)), numel(shape):-1:1);
  end
end
