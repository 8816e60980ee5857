function done = job(request)
% JOB  Submit a job on stored arrays, wait for its end and return it as a struct.
%
%   done = gemmserve.job(struct('op', 'gemm', 'a', ida, 'b', idb));
%   d = gemmserve.download(done.result.d);
%
%   The job is on record before the server answers: it survives the end of this program and of the server. Sent again
%   after an answer that was lost, it is not done twice, because of its key. A job that fails raises
%   gemmserve:<problem>.
  stream = fopen('/dev/urandom', 'r'); % not rand: programs that set its seed would repeat themselves
  key = sprintf('%02x', fread(stream, 16, 'uint8'));
  fclose(stream);
  answer = gemmserve.request('/v1/jobs', '--header', 'Content-Type: application/json', '--header', 'Prefer: wait=30', ...
                             '--header', ['Idempotency-Key: ' key], '--retry', '3', '--data-binary', jsonencode(request));
  done = jsondecode(char(answer));
  while any(strcmp(done.state, {'queued', 'running'}))
    done = jsondecode(char(gemmserve.request(['/v1/jobs/' done.id '?wait=30'])));
  end
  if ~strcmp(done.state, 'succeeded')
    parts = strsplit(done.error.type, '/');
    error(['gemmserve:' strrep(parts{end}, '-', '_')], '%s: %s', done.error.title, done.error.detail);
  end
end
