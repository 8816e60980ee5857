function remove(id)
% REMOVE  Delete the array of that id from the server.
%
%   gemmserve.remove(id)
  gemmserve.request(['/v1/arrays/' id], '--request', 'DELETE');
end
