function body = request(path, varargin)
% REQUEST  Send one request by curl and return the body of the answer, a row of uint8.
%
%   body = gemmserve.request(path, argument, ...)
%
%   Further arguments are curl's own. GEMMSERVE_SERVER names the server, http://127.0.0.1:8000 by default, and
%   GEMMSERVE_API_KEY the key. Both are read by the shell, and the key goes to curl by its standard input: arguments
%   are seen by everybody on the machine. Answers of 400 and above raise gemmserve:<problem>, for example
%   gemmserve:shape_mismatch, with the problem's title and detail; no answer at all raises gemmserve:connection.
  file = tempname();
  cleaner = onCleanup(@() remove(file));
  words = '';
  for word = varargin
    words = [words ' ' quoted(word{1})];
  end
  command = [ ...
    'if [ -n "$GEMMSERVE_API_KEY" ]; then printf ''header = "Authorization: Bearer %s"\n'' "$GEMMSERVE_API_KEY"; fi | ' ...
    'curl --config - --silent --show-error --output ' quoted(file) ' --write-out ''%{http_code}'' ' words ...
    ' "${GEMMSERVE_SERVER:-http://127.0.0.1:8000}"' quoted(path) ' 2>&1'];
  [status, said] = system(command);
  if status ~= 0
    error('gemmserve:connection', '%s', strtrim(said));
  end
  body = zeros(1, 0, 'uint8');
  if exist(file, 'file') % curl makes none for an answer without a body
    stream = fopen(file, 'r');
    body = fread(stream, [1 Inf], '*uint8');
    fclose(stream);
  end
  if str2double(said) >= 400
    if isempty(body) || body(1) ~= double('{') % of something between here and the server
      error('gemmserve:http', 'status %s: %s', said, char(body));
    end
    problem = jsondecode(char(body));
    parts = strsplit(problem.type, '/');
    error(['gemmserve:' strrep(parts{end}, '-', '_')], '%s: %s', problem.title, problem.detail);
  end
end

function word = quoted(word)
% QUOTED  Return the word as the shell takes it literally.
  word = ['''' strrep(word, '''', '''\''''') ''''];
end

function remove(file)
% REMOVE  Delete the file if it is there.
  if exist(file, 'file')
    delete(file);
  end
end
