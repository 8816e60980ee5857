function id = upload(a, varargin)
% UPLOAD  Upload an array and return its id, which jobs take as an operand until it is deleted.
%
%   id = gemmserve.upload(a)
%   id = gemmserve.upload(a, '?name=weights&ttl_s=3600')
  file = [tempname() '.npy'];
  cleaner = onCleanup(@() delete(file));
  gemmserve.write_npy(file, a);
  answer = gemmserve.request(['/v1/arrays' varargin{:}], '--header', 'Content-Type: application/x-npy', ...
                             '--data-binary', ['@' file]);
  info = jsondecode(char(answer));
  id = info.id;
end
